"""Exact Jacobian: our rate against the machine's matrix-product rate, and against replicating the prompt.

    python benchmarks/exact_rate.py [--device cuda] [--length 128] [--products 64]

The other way is jacobian-lens's, written out here: the prompt is repeated once per output direction of a batch, one
forward pass records the graph, and each backward pass gives as many products as there are repetitions. All are timed in
turn in one process, on one random Llama of 8 blocks and width 512.
"""

from __future__ import annotations

import argparse

import torch
from machine import alternate, describe, gemm
from transformers import LlamaConfig, LlamaForCausalLM

import probes
from probes.jacobian import _Apart, _Estimate, _Prompt, _Reporter


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--products", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    device, length, products = given.device, given.length, given.products

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=max(512, length),
    )
    model = LlamaForCausalLM(config).eval().to(device)
    tokens = torch.randint(1000, (1, length))
    view = probes.load(model)
    prompt = _Prompt(view, tokens, "residual", [0], _Apart.of(view, 0, "parts"), None, check=False)
    directions = torch.eye(512, dtype=torch.float64)[:, :products]
    found: dict[str, torch.Tensor] = {}

    def ours() -> None:
        estimate = _Estimate(512, torch.Generator())
        with prompt.linearized():
            estimate.add_exact(prompt, directions, _Reporter(None, products))
        found["ours"] = estimate.squared()[0]

    def replicated(batch: int) -> None:
        embedded = view.embed(tokens).expand(batch, -1, -1).clone().requires_grad_()
        last: dict[str, torch.Tensor] = {}
        handle = model.model.norm.register_forward_pre_hook(lambda module, args: last.update(stream=args[0]))
        model.model(inputs_embeds=embedded, use_cache=False)
        handle.remove()
        total = torch.zeros(length, dtype=torch.float64, device=device)
        for start in range(0, products, batch):
            cotangent = torch.zeros_like(last["stream"])
            rows = torch.arange(batch, device=device)
            cotangent[rows, -1, start + rows] = 1
            (gradient,) = torch.autograd.grad(last["stream"], embedded, cotangent, retain_graph=True)
            total += gradient.pow(2).sum((0, 2)).double()
        found[f"replicated {batch}"] = total.cpu()

    product, operations = gemm(2048, torch.float32, device)
    batches = [batch for batch in (8, 32) if products % batch == 0]
    calls = {"ours": ours, "gemm": product} | {
        f"replicated {batch}": (lambda batch=batch: replicated(batch)) for batch in batches
    }
    seconds = alternate(calls, rounds=given.rounds, device=device)
    work = products * prompt.product_flops()
    peak = operations / seconds["gemm"]

    print(describe(device))
    print(f"random Llama, 8 blocks, width 512, T = {length}, float32, {products} products; medians of {given.rounds}")
    print(f"2048^3 matrix product: {peak / 1e9:.0f} GFLOP/s")
    print(f"ours: {seconds['ours']:.3f} s, {work / seconds['ours'] / peak:.0%} of that rate (chunk {prompt.chunk})")
    for batch in batches:
        name = f"replicated {batch}"
        gap = (found["ours"].sqrt() / found[name].sqrt() - 1).abs().max().item()
        print(
            f"{name} times: {seconds[name]:.3f} s, {seconds[name] / seconds['ours']:.2f} times ours; "
            f"norms agree to {gap:.1e}"
        )


if __name__ == "__main__":
    main()
