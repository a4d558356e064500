"""From every documented data format to token ids, truncated and collated."""
