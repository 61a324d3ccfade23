"""Trains the demo model tiny-gpt-oss and writes its compact weights.

Minutes on a GPU, under an hour on two cores.

`--start` goes on from the weights of a compact model, with its vocabulary: fewer steps at a lower
rate teach it more.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM

from dynamo_trtllm.models.expand import TOUCHED_IDS, WEIGHTS, WEIGHTS_HASH, data_folder
from examples import Vocabulary, compact_example, make_examples, make_vocabulary

BATCH_TOKENS_PER_LESSON = 512  # a batch holds fewer lessons when they are longer than this
CHUNK = 40  # batches among which lessons are sorted by length
REPORT_EVERY = 50
WARMUP_STEPS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    # [lessons, tokens], padded on the right: causal attention never looks at padding.
    ids: torch.Tensor
    targets: torch.Tensor  # the same shape; -100 where no loss is taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    ids: list[np.ndarray]
    output_starts: list[int]

    def batches(self, size: int, rng: np.random.Generator) -> Iterator[list[int]]:
        """Yield indices of lessons with similar lengths, without end.

        Each round has every lesson once.
        """
        lengths = [len(ids) for ids in self.ids]
        chunk_size = size * CHUNK
        while True:
            order = [int(index) for index in rng.permutation(len(self.ids))]
            for start in range(0, len(order), chunk_size):
                chunk = order[start : start + chunk_size]
                chunk.sort(key=lambda index: -lengths[index])
                packs = list(_packs(chunk, lengths, size))
                for number in rng.permutation(len(packs)):
                    yield packs[number]

    def batch(self, indices: list[int], device: torch.device) -> Batch:
        width = max(len(self.ids[index]) for index in indices)
        ids = np.zeros((len(indices), width), dtype=np.int64)
        targets = np.full((len(indices), width), -100, dtype=np.int64)
        for row, index in enumerate(indices):
            lesson = self.ids[index]
            output_start = self.output_starts[index]
            ids[row, : len(lesson)] = lesson
            # A position predicts the token that follows it.
            targets[row, output_start - 1 : len(lesson) - 1] = lesson[output_start:]
        return Batch(
            ids=torch.from_numpy(ids).to(device),
            targets=torch.from_numpy(targets).to(device),
        )


def _packs(indices: list[int], lengths: list[int], size: int) -> Iterator[list[int]]:
    """Divide lessons, the longest first, into batches of at most `size` and about equal size."""
    while indices:
        longest = lengths[indices[0]]
        num_fitting = size * BATCH_TOKENS_PER_LESSON // longest
        num_lessons = max(1, min(size, num_fitting))
        yield indices[:num_lessons]
        indices = indices[num_lessons:]


def build_corpus(
    arguments: argparse.Namespace, known: Vocabulary | None
) -> tuple[Corpus, Vocabulary]:
    examples = make_examples(arguments.lessons, seed=arguments.seed, processes=os.cpu_count() or 1)
    vocab = known or make_vocabulary(examples)
    rng = np.random.default_rng(arguments.seed)
    ids = [compact_example(example, vocab, rng) for example in examples]
    return Corpus(ids=ids, output_starts=[example.output_start for example in examples]), vocab


def build_model(rows: int, start: dict[str, np.ndarray]) -> GptOssForCausalLM:
    """Return a model with `rows` vocabulary rows and the weights of `start`.

    The weights are random if `start` is empty.
    """
    config = GptOssConfig(**_full_config())
    config.vocab_size = rows
    config.initializer_range = 0.06
    # The ids of these tokens are not in the compact rows.
    config.bos_token_id = None
    config.pad_token_id = None
    config.eos_token_id = None
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = GptOssForCausalLM(config)
    if start:
        weights = {name: torch.from_numpy(value).float() for name, value in start.items()}
        model.load_state_dict(weights)
    return model


def _full_config() -> dict[str, Any]:
    """Return the content of config.json, which has the full vocabulary."""
    config: dict[str, Any] = json.loads((data_folder() / "config.json").read_text(encoding="utf-8"))
    return config


def loss_of(model: GptOssForCausalLM, batch: Batch, rest_bias: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy over the output.

    The last row counts for all rows that it will be copied to.
    """
    hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
    wanted = batch.targets >= 0
    logits = model.lm_head(hidden[wanted]) + rest_bias
    return torch.nn.functional.cross_entropy(logits, batch.targets[wanted])


def train(
    model: GptOssForCausalLM, corpus: Corpus, vocab_size: int, arguments: argparse.Namespace
) -> float:
    device = torch.device(arguments.device)
    model.to(device).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=arguments.rate, betas=(0.9, 0.98), weight_decay=0.05
    )
    rows = model.config.vocab_size
    rest_bias = torch.zeros(rows, device=device)
    rest_bias[-1] = math.log(vocab_size - rows + 1)
    started = time.monotonic()
    recent = torch.zeros((), device=device)  # sum of the losses since the last report
    batches = corpus.batches(arguments.batch, np.random.default_rng(arguments.seed + 1))
    mean = 0.0
    for step in range(1, arguments.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = arguments.rate * _schedule(step, arguments.steps)
        loss = loss_of(model, corpus.batch(next(batches), device), rest_bias)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent += loss.detach()
        if step % REPORT_EVERY == 0 or step == arguments.steps:
            num_steps = (step - 1) % REPORT_EVERY + 1
            mean = recent.item() / num_steps
            spent_s = time.monotonic() - started
            print(
                f"step {step}/{arguments.steps} loss {mean:.4f} after {spent_s:.0f} s", flush=True
            )
            recent.zero_()
    return mean


def _schedule(step: int, steps: int) -> float:
    """Return the factor of the learning rate: a linear warm-up, and a cosine down to 0.02."""
    warm_up = min(1.0, step / WARMUP_STEPS)
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return warm_up * (0.02 + 0.98 * cosine)


def save(model: GptOssForCausalLM, vocab: Vocabulary, folder: Path) -> None:
    """Write the compact model: fp16 weights, their hash, and the config for the full vocabulary."""
    tensors = {
        name: value.detach().cpu().to(torch.float16).numpy()
        for name, value in model.state_dict().items()
    }
    tensors[TOUCHED_IDS] = vocab.touched
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS)
    data = (folder / WEIGHTS).read_bytes()
    hash_line = f"{hashlib.sha256(data).hexdigest()}  {WEIGHTS}\n"
    (folder / WEIGHTS_HASH).write_text(hash_line, encoding="ascii")
    config = (data_folder() / "config.json").read_text(encoding="utf-8")
    (folder / "config.json").write_text(config, encoding="utf-8")
    print(
        f"wrote {folder / WEIGHTS}: {len(data) / 1e6:.2f} MB, {vocab.rest} touched ids", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        default=data_folder(),
        help="folder of the compact model (default: package)",
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu"
    )
    parser.add_argument(
        "--start", type=Path, help="folder of a compact model whose weights training starts from"
    )
    parser.add_argument("--steps", type=int, default=1500, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=32, help="lessons in one step")
    parser.add_argument("--lessons", type=int, default=60_000, help="different lessons to write")
    parser.add_argument("--rate", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=1, help="seed of corpus, weights and order")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    started = time.monotonic()
    start = load_file(arguments.start / WEIGHTS) if arguments.start else {}
    known = Vocabulary(touched=start.pop(TOUCHED_IDS)) if start else None
    corpus, vocab = build_corpus(arguments, known)
    num_tokens = sum(len(ids) for ids in corpus.ids)
    spent_s = time.monotonic() - started
    print(f"{len(corpus.ids)} lessons, {num_tokens} tokens, written in {spent_s:.0f} s", flush=True)
    model = build_model(vocab.rest + 1, start)
    num_parameters = sum(value.numel() for value in model.parameters())
    print(f"{num_parameters} parameters in training", flush=True)
    final_loss = train(model, corpus, _full_config()["vocab_size"], arguments)
    print(f"final loss {final_loss:.4f}", flush=True)
    save(model, vocab, arguments.out)


if __name__ == "__main__":
    main()
