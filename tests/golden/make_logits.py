"""Writes `logits_<model>.npz`: what Transformers computes in float32 from the same GGUF file.

    python tests/golden/make_logits.py smollm2 path/to/SmolLM2-135M-Instruct.Q4_1.gguf
    python tests/golden/make_logits.py gemma3-270m path/to/gemma-3-270m-q4_k_m.gguf

Needs the extra `[bench]`. Token ids come from llama.cpp (Transformers rebuilds a broken tokenizer from these files),
weights and logits from Transformers, so neither depends on this project. For prompt number i the file holds

    text_i         the text, utf-8 bytes
    ids_i          [T] int32 token ids
    positions_i    [R] int32 positions whose rows of logits are kept (the last one always)
    top_ids_i      [R, 64] int32 the 64 most probable ids of each row, most probable first
    top_logprobs_i [R, 64] float32 their log-probabilities
    greedy_i       [64] int32 greedy continuation
    margins_i      [64] float32 log-probability of the chosen id minus that of the runner-up, per step
"""

from __future__ import annotations

import argparse
from pathlib import Path

import llama_cpp
import numpy as np
import torch
import transformers

ROWS = 12
TOP = 64
STEPS = 64
LONG = 3000

PROMPTS = [
    "Hello",
    "The capital of France is",
    "Once upon a time, in a village between two rivers, there lived a clockmaker who",
    'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n',
    "#include <stdio.h>\n\nint main(int argc, char **argv) {\n    for (int i = 1; i < argc; i++) {\n",
    "SELECT c.name, SUM(o.total) AS revenue\nFROM customers c\nJOIN orders o ON",
    "Die Donau entspringt im Schwarzwald und fließt durch",
    "Le petit déjeuner se compose généralement de pain, de beurre et",
    "日本の首都は東京です。人口は",
    "中国的长城是世界上最著名的建筑之一，它",
    "Привет! Сегодня хорошая погода, и мы решили",
    "مرحبا، كيف يمكنني أن أساعدك اليوم؟",
    "Emoji test: 🙂🚀🇯🇵👩‍👩‍👧 — what do they mean?",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    '{"name": "Ada", "born": 1815, "fields": ["mathematics", "computing"], "address": {"city":',
    "Translate to Spanish: The weather is nice today and the children are playing in the park.\n",
    "Whitespace \t tabs\n\n\n   three spaces    four",
    "Q: If a train travels 60 km in 45 minutes, what is its average speed in km/h?\nA: Let's think step by step.",
]
CHAT = {
    "smollm2": "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nExplain in two sentences why the sky is blue.<|im_end|>\n<|im_start|>assistant\n",
    "gemma3-270m": "<start_of_turn>user\nExplain in two sentences why the sky is blue.<end_of_turn>\n"
    "<start_of_turn>model\n",
}


def long_text() -> str:
    """A log of a made-up expedition: regular enough to be predicted, varied enough not to collapse into a loop."""
    places = ["harbour", "lighthouse", "quarry", "orchard", "observatory", "mill", "chapel", "bridge", "glacier"]
    people = ["Ines", "Tomasz", "Mei", "Olufemi", "Greta", "Rafael", "Anoushka"]
    finds = ["a rusted key", "three blue eggs", "an unsigned letter", "fresh tracks", "a broken compass"]
    lines = []
    for day in range(1, 200):
        who, where, what = people[day * 3 % 7], places[day * 5 % 9], finds[day * 2 % 5]
        lines.append(
            f"Day {day}. {who} walked {day * 37 % 23 + 2} km to the {where} and found {what}; "
            f"the temperature was {day * 13 % 31 - 5} degrees and the wind came from the "
            f"{('north', 'east', 'south', 'west')[day * 7 % 4]}."
        )
    return "\n".join(lines)


def tokenize(llm: llama_cpp.Llama, text: str) -> list[int]:
    """Ids as llama.cpp serves them, the model's own beginning-of-text token included."""
    return llm.tokenize(text.encode(), add_bos=True, special=True)


def prompt_ids(llm: llama_cpp.Llama, name: str) -> list[tuple[str, list[int]]]:
    """All prompts with their ids; the first is cut to one token, the last to `LONG`."""
    texts = [*PROMPTS, CHAT[name], long_text()]
    out = [(text, tokenize(llm, text)) for text in texts]
    out[0] = (texts[0], out[0][1][:1])
    assert len(out[-1][1]) > LONG
    out[-1] = (texts[-1], out[-1][1][:LONG])
    return out


def kept_positions(length: int) -> np.ndarray:
    """At most `ROWS` positions, evenly spread in short prompts, the last ones of long prompts."""
    if length > 1000:
        return np.arange(length - ROWS, length)
    return np.unique(np.linspace(0, length - 1, min(length, ROWS)).round().astype(np.int64))


def rows(model: torch.nn.Module, ids: list[int], positions: np.ndarray) -> torch.Tensor:
    """Log-probabilities [R, V] of a plain forward pass over `ids`, at `positions`."""
    out = model(torch.tensor([ids]), use_cache=False, logits_to_keep=torch.as_tensor(positions))
    return torch.log_softmax(out.logits[0].float(), dim=-1)


def greedy(model: torch.nn.Module, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Greedy continuation and margins, with the KV cache; then checked by one pass without it."""
    chosen: list[int] = []
    step, past = torch.tensor([ids]), None
    for _ in range(STEPS):
        out = model(step, past_key_values=past, use_cache=True, logits_to_keep=1)
        past = out.past_key_values
        chosen.append(int(out.logits[0, -1].argmax()))
        step = torch.tensor([[chosen[-1]]])
    again = rows(model, ids + chosen[:-1], np.arange(len(ids) - 1, len(ids) + STEPS - 1))
    best = again.topk(2, dim=-1)
    assert best.indices[:, 0].tolist() == chosen, "Transformers disagrees with itself with and without its cache"
    return np.array(chosen, np.int32), (best.values[:, 0] - best.values[:, 1]).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(CHAT))
    parser.add_argument("gguf", type=Path)
    args = parser.parse_args()
    llm = llama_cpp.Llama(str(args.gguf), vocab_only=True, verbose=False)
    prompts = prompt_ids(llm, args.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.gguf.parent, gguf_file=args.gguf.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    arrays: dict[str, np.ndarray] = {}
    with torch.inference_mode():
        for i, (text, ids) in enumerate(prompts):
            positions = kept_positions(len(ids))
            top = rows(model, ids, positions).topk(TOP, dim=-1)
            continuation, margins = greedy(model, ids)
            arrays |= {
                f"text_{i}": np.frombuffer(text.encode(), np.uint8),
                f"ids_{i}": np.array(ids, np.int32),
                f"positions_{i}": positions.astype(np.int32),
                f"top_ids_{i}": top.indices.numpy().astype(np.int32),
                f"top_logprobs_{i}": top.values.numpy(),
                f"greedy_{i}": continuation,
                f"margins_{i}": margins,
            }
            print(f"{i}: {len(ids)} tokens, smallest margin {margins.min():.2e}", flush=True)
    np.savez_compressed(Path(__file__).parent / f"logits_{args.name}.npz", **arrays)


if __name__ == "__main__":
    main()
