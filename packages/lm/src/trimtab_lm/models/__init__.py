"""Models around a language model: value head, reward adapter, reference policy, adapters."""
