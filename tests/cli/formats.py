"""Rows of files as people have them, each with the subcommand that trains on it."""

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
ROWS = {
    "alpaca": ("sft", {"instruction": "add", "input": "1 2", "output": "3"}),
    "gsm8k": ("sft", {"question": "one and one", "answer": "two"}),
    "sharegpt": ("sft", {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}),
    "messages": ("sft", {"messages": TALK}),
    "sharegpt pairs": (
        "dpo",
        {
            "conversations": [{"from": "human", "value": "hi"}],
            "chosen": {"from": "gpt", "value": "yes"},
            "rejected": {"from": "gpt", "value": "no"},
        },
    ),
    "ultrafeedback": (
        "dpo",
        {
            "prompt": "hi",
            "prompt_id": "f0e37e9f",
            "chosen": TALK,
            "rejected": [TALK[0], {"role": "assistant", "content": "no"}],
            "messages": TALK,
            "score_chosen": 6.0,
            "score_rejected": 4.0,
        },
    ),
    "alpaca pairs": ("dpo", {"instruction": "add", "input": "", "chosen": "yes", "rejected": "no"}),
}
