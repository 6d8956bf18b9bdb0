"""Writes what transformers generates, greedy and in float32: ``python tests/compile/make_goldens.py NAME MODEL.gguf``.

The tests compare against the files it writes (minutes of work, so it is not done in every run); a slow test makes a
sample of them anew.
"""

import json
import sys
from pathlib import Path
from typing import Any

TOKENS = 64
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics state that",
    "Water boils at a temperature of",
    "In 1969, the first human",
    "A recipe for a good tomato soup: first,",
    "The derivative of x^2 is",
    "Dear Sir or Madam,\n\nI am writing to",
    "The mitochondria is the",
    "List of the planets of the solar system:\n1.",
    "To be, or not to be,",
    "The main difference between a list and a tuple in Python is",
    "Der schnelle braune Fuchs",
    "Photosynthesis is the process by which",
    "import numpy as np\n\nx = np.",
    "Shakespeare wrote many plays, among them",
    "The speed of light in vacuum is approximately",
    "Q: How many legs does a spider have?\nA:",
    "It was a dark and stormy night; the rain fell in torrents, except at occasional intervals, when it was checked by",
)


def generate(place: Path, count: int = len(PROMPTS)) -> list[dict[str, Any]]:
    """Prompt and output token ids of the first ``count`` prompts."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(place.parent, gguf_file=place.name)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        place.parent,
        gguf_file=place.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    model = loaded.eval()
    model.generation_config.eos_token_id = None  # an end-of-text token is a token like any other here
    results = []
    for prompt in PROMPTS[:count]:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False
            )
        results.append({"prompt": ids[0].tolist(), "output": made[0, ids.shape[1] :].tolist()})
    return results


if __name__ == "__main__":
    target = Path(__file__).parent / "goldens" / f"{sys.argv[1]}.json"
    target.write_text(
        json.dumps(generate(Path(sys.argv[2])), indent=None, separators=(",", ":")).replace("},", "},\n")
        + "\n"
    )
