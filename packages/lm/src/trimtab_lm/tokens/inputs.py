"""What a model reads: the arguments of its forward, from a batch of laid-out tokens."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.masking_utils import find_packed_sequence_indices

from trimtab_lm.compat.models import attention_of, unmasked
from trimtab_lm.interface import Batch, Forward, Model, ModelInputs, base_of, decoder_config, learns_prompt
from trimtab_lm.tokens.attention import attends_fully, tree_mask
from trimtab_lm.tokens.fast import GroupMask
from trimtab_lm.tokens.layout import INPUT_KEYS
from trimtab_lm.tokens.positions import positioned
from trimtab_lm.tokens.router import has_router_loss

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class TokenReader:
    """Makes a model's inputs of batches of `lay_out`; reads once what depends on the model alone.

    Args:
        model: the model that will read the inputs.
        forward: the forward that will take them; default: the model's own.
    """

    def __init__(self, model: Model, forward: Forward | None = None):
        self.model, self.decoder = base_of(model), decoder_config(model)
        self.forward = self.model.forward if forward is None else forward
        self.has_router_loss, self.attends_fully = has_router_loss(model), attends_fully(model)
        # Virtual tokens are no part of the inputs, and models with attention of their own (Falcon) read the mask.
        self.needs_mask = learns_prompt(model) or not self.model.is_backend_compatible()

    def inputs(self, tokens: Batch) -> ModelInputs:
        """Returns the arguments of the model's forward for a laid-out batch.

        For a tree, and for documents in a single row, it builds the attention mask [R, 1, W, W]. It runs an encoder
        whose prompts have several branches, once per prompt. Padded rows get position ids that skip padding.

        Args:
            tokens: a batch of `lay_out`, on the model's device.
        """
        inputs: ModelInputs = {name: tokens[name] for name in INPUT_KEYS if name in tokens}
        if "branch" in tokens:
            inputs["attention_mask"] = self._tree_mask(tokens["document"], tokens["branch"])
        elif "position_ids" in tokens:
            # A router's loss reads the mask as one of tokens.
            is_free = "attention_mask" not in tokens and not self.has_router_loss
            if is_free and self.runs_by_group(tokens["position_ids"]):
                document = find_packed_sequence_indices(tokens["position_ids"])  # None: a single one
                if document is not None:
                    inputs["attention_mask"] = GroupMask.of(document, torch.zeros_like(document))
        if "encoder_row" in tokens and len(tokens["encoder_row"]) > len(tokens["input_ids"]):
            rows = tokens["encoder_row"]
            encoder = self.model.get_encoder()
            output = encoder(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
            output.last_hidden_state = output.last_hidden_state.index_select(0, rows)
            inputs["encoder_outputs"] = output  # of the model's own class, which may hold more (router logits)
            for name in ("input_ids", "attention_mask"):  # without input_ids FSMT has no causal mask
                inputs[name] = inputs[name].index_select(0, rows)
        return positioned(self.forward, inputs)

    def attending(self, inputs: ModelInputs) -> AbstractContextManager[None]:
        """Around the forward of `inputs`: rows of one sequence each, padded on the right, need no mask."""
        is_causal = "attention_mask" not in inputs and "position_ids" not in inputs and self.attends_fully
        if not is_causal or self.needs_mask or attention_of(self.model) != "sdpa" or torch.compiler.is_compiling():
            return nullcontext()
        return unmasked(self.decoder)

    def runs_by_group(self, ids: Tensor) -> bool:
        """Whether the attention of rows `ids` [R, W] can run group by group: in SDPA, over a single row on a CPU.

        An accelerator would start many small kernels, and has varlen ones.
        """
        is_one = ids.device.type == "cpu" and ids.dim() == 2 and len(ids) == 1 and not torch.compiler.is_compiling()
        return is_one and self.attends_fully and attention_of(self.model) == "sdpa"

    def _tree_mask(self, document: Tensor, branch: Tensor) -> "Tensor | BlockMask":
        """Returns the mask of a tree in the form that the model's attention takes; see `lay_out` for the columns."""
        if self.runs_by_group(document):
            return GroupMask.of(document, branch)
        attention = attention_of(self.model)
        if attention == "flex_attention":
            return _block_mask(document, branch)
        mask = tree_mask(document, branch)
        if attention != "eager":
            return mask
        dtype = next(self.model.parameters()).dtype
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def _block_mask(document: Tensor, branch: Tensor) -> "BlockMask":
    """Returns the mask of a tree for flex attention."""
    from torch.nn.attention.flex_attention import create_block_mask

    def reads(b: Tensor, _: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same = (document[b, q] == document[b, k]) & (k <= q)
        return same & ((branch[b, k] == 0) | (branch[b, k] == branch[b, q]))

    rows, width = document.shape
    return create_block_mask(reads, rows, None, width, width, device=document.device)
