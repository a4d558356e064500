"""`trimtab chat MODEL`: shows a model's answers next to its reference's."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from peft import PeftConfig
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import find_adapter_config_file

from trimtab_common.seeding import set_seed
from trimtab_lm.data.tokenization import encode_prompt
from trimtab_lm.models.loading import AutoModel, load_model
from trimtab_lm.sampling.generate import generate, response_texts
from trimtab_lm.sampling.rollout import sampling_config

from .places import refuse_missing_path
from .subcommands import errors_in_one_line, keep_pipes_quiet

PROGRAM = "trimtab chat"
ABOUT = """Talk to a model: each line of the input is a message, and the end of the input (Ctrl-D) ends the talk.

A model with a chat template remembers the conversation; /new begins another one. A model without a template continues
each line by itself. MODEL is a hub id, or a folder of a model, of an adapter, or of a model with a value head. With
--reference both models answer; each remembers its own answers.

  trimtab chat runs/dpo --reference my-sft-model
  echo "Once upon a time" | trimtab chat runs/ppo --max-new-tokens 40"""


def main(argv: Sequence[str]) -> int:
    """Answer the lines of stdin; the exit status."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="hub id or folder")
    add("--reference", metavar="MODEL", help="hub id or folder of a model that answers too")
    add("--max-new-tokens", "--max_new_tokens", type=int, default=128, help="tokens of an answer at most (default 128)")
    add("--temperature", type=float, default=1.0, help="divides the logits; 0: the likeliest token (default 1)")
    add("--system", help="the system message of a model with a chat template")
    add("--seed", type=int, default=0, help="of the sampling (default 0)")
    flags = parser.parse_args(argv)
    keep_pipes_quiet()
    with errors_in_one_line("chat"):
        if flags.max_new_tokens < 1 or flags.temperature < 0:
            raise ValueError("--max-new-tokens and --temperature: use 1 token or more, and a temperature of 0 or more.")
        set_seed(flags.seed)
        names = {"": flags.model} if flags.reference is None else {"model": flags.model, "reference": flags.reference}
        speakers = {name: Speaker.load(source, flags.system) for name, source in names.items()}
    heat = {"do_sample": True, "temperature": flags.temperature} if flags.temperature else {"do_sample": False}
    for line in filter(None, map(str.strip, lines())):
        for name, speaker in speakers.items():
            if line == "/new":
                speaker.forget()
                continue
            try:
                answer = speaker.answer(line, {"max_new_tokens": flags.max_new_tokens, **heat})
                print(f"{name}: {answer}".removeprefix(": "), flush=True)
            except ValueError as error:  # of a conversation that is too long for the model
                print(f"{PROGRAM}: {error} /new begins another conversation.", file=sys.stderr)
    return 0


def lines() -> Iterator[str]:
    """The lines of stdin, after a prompt at a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield from sys.stdin
        return
    with suppress(EOFError):
        while True:
            yield input("> ")
    print()  # the shell's prompt comes on a line of its own


@dataclass
class Speaker:
    """A model with its tokenizer and the conversation so far, which begins with a system message if there is one."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    @classmethod
    def load(cls, source: str, system: str | None = None) -> "Speaker":
        """The model of a hub id or folder; ValueError for a reward model, and for a system message that none reads."""
        refuse_missing_path(source)
        is_adapter = find_adapter_config_file(source) is not None
        base = str(PeftConfig.from_pretrained(source).base_model_name_or_path) if is_adapter else source
        config = AutoConfig.from_pretrained(base)
        if any("Classification" in name for name in config.architectures or ()):
            raise ValueError(f"{source} is a reward model, which writes no text. Name a language model.")
        kind: AutoModel = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model = cast(nn.Module, load_model(kind, source, (), {"dtype": "auto"}, is_trainable=False, hub={}))
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        tokenizer = AutoTokenizer.from_pretrained(source)
        if system is not None and tokenizer.chat_template is None:
            raise ValueError(f"{source} has no chat template, so there is no place for a system message.")
        speaker = cls(model.to(device).eval(), tokenizer, system)
        speaker.forget()
        return speaker

    def forget(self) -> None:
        """Begin another conversation."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def answer(self, text: str, sampling: dict[str, object]) -> str:
        """The model's answer to a message; without a chat template, its continuation of a text."""
        talk = [*self.messages, {"role": "user", "content": text}]
        prompt = text if self.tokenizer.chat_template is None else talk
        ids = encode_prompt(self.tokenizer, prompt)["input_ids"]
        if self.model.config.is_encoder_decoder:
            ids = [*ids, self.tokenizer.eos_token_id]
        query = torch.tensor(ids, device=self.model.device)
        config, rest = sampling_config(self.model, self.tokenizer, **sampling)
        responses = generate(self.model, [query], config, batch_size=1, return_prompt=False, **rest)
        options = {"is_encoder_decoder": bool(self.model.config.is_encoder_decoder)}
        (reply,) = response_texts(self.tokenizer, [query], responses, **options)
        self.messages = [*talk, {"role": "assistant", "content": reply.strip()}]
        return reply.strip()
