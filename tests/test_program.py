"""tools/program.py and tools/kinks.py against a stand-in of the published program, which the tests do not have."""

import sys
from types import SimpleNamespace

import pytest
import torch
from test_tools import TOOLS, tool
from torch import nn

from toy.model import Architecture, sinusoids
from toy.train import Run

WIDTH, LABELS = 64, 32


class Attention(nn.Module):
    """One head with the program's names; RoPE turns neighbours."""

    def __init__(self, rope: bool) -> None:
        super().__init__()
        self.query_projection = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key_projection = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value_projection = nn.Linear(WIDTH, WIDTH, bias=False)
        self.rope = rope

    def forward(self, x):
        q, k, v = self.query_projection(x), self.key_projection(x), self.value_projection(x)
        if self.rope:
            q, k = turned(q), turned(k)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return (q @ k.mT / WIDTH**0.5).masked_fill(later, -torch.inf).softmax(-1) @ v


def turned(x):
    """Neighbouring components as complex numbers, turned by the position."""
    rate = 10_000.0 ** (-torch.arange(0, WIDTH, 2).double() / WIDTH)
    turns = torch.polar(torch.ones((), dtype=torch.float64), torch.arange(x.shape[1])[:, None] * rate)
    return torch.view_as_real(torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * turns).flatten(-2).to(x.dtype)


class Sinusoids(nn.Module):
    """Ours, moved by `error`."""

    def __init__(self, error: float) -> None:
        super().__init__()
        self.register_buffer(
            "pe", sinusoids(Architecture(width=WIDTH, length=17, positional="sinusoidal"))[None] + error
        )


class San(nn.Module):
    """The published model's shape, causal."""

    def __init__(self, *, num_attn_layers, residual, pe, scaled=1.0, error=0.0, **_):
        super().__init__()
        self.attn_layers = nn.ModuleList(Attention(pe == "rope") for _ in range(num_attn_layers))
        self.mlp_layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.pos_encoding = Sinusoids(error) if pe == "sin" else None
        self.lin, self.residual, self.scaled = nn.Linear(WIDTH, LABELS), residual, scaled

    def forward(self, x):
        if self.pos_encoding is not None:
            x = x + self.pos_encoding.pe
        for layer in self.attn_layers:
            x = layer(x * self.scaled) + (x if self.residual else 0)
        x = x[:, -1]
        for layer in self.mlp_layers:
            x = layer(x).relu()
        return self.lin(x)


class Sequences:
    """Vectors and labels that depend on the index alone."""

    def __init__(self, **_) -> None:
        pass

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index):
        torch.manual_seed(index)
        return torch.randn(17, WIDTH) / WIDTH, index % LABELS


def loop(model, batches, *rest, num_iter, rec_freq):
    *_, criterion, optimizer, _ = rest
    for _, (inputs, answers) in zip(range(num_iter), batches, strict=False):
        optimizer.zero_grad()
        criterion(model(inputs), answers).backward()
        optimizer.step()


@pytest.fixture
def program(monkeypatch, tmp_path):
    """(the tool, the stand-in's parts)."""
    parts = {"data": {"TrainDataset": Sequences}, "models": {"SAN": San}, "train": {"train": loop}}
    for name, content in parts.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))
    monkeypatch.syspath_prepend(str(TOOLS))
    found = tool("program")
    yield found, found.Draws(tmp_path)
    for name in ("program", "published"):
        sys.modules.pop(name, None)


def runs(draws) -> list[Run]:
    shape = dict(blocks=2, width=WIDTH, length=17, vocabulary=None, outputs=LABELS, output_projection=False, head="mlp")
    tasks = draws.tasks(4)
    return [
        Run(Architecture(**shape, positional=positional, residual=residual), tasks[scale], 0, 1e-3, 1e-6)  # type: ignore[arg-type]
        for scale in tasks
        for positional in ("none", "rope")
        for residual in (False, True)
    ]


def test_a_program_of_the_same_definitions_is_within_rounding_of_ours(program):
    tool, draws = program
    found = list(tool.compared(draws, runs(draws), 5, everywhere=True))
    assert len(found) == 8
    for one in found:
        assert one.apart.max() < 1e-13
        assert one.weights < 1e-10  # Adam divides by gradients, some of which are nearly 0
    assert "in 8 of 8 settings" in "\n".join(tool.section("All in float64", found))


def test_another_definition_is_found(program):
    tool, draws = program
    draws.san = lambda **options: San(**options, scaled=1.01)
    found = list(tool.compared(draws, runs(draws)[:4], 3, everywhere=True))  # at the text's scale
    assert min(float(one.apart[-1]) for one in found) > tool.MARGIN
    assert "in 0 of 4 settings" in "\n".join(tool.section("All in float64", found))


@pytest.mark.parametrize(("error", "parts"), [(0.0, False), (1e-2, True)])
def test_the_first_unit_that_is_on_in_one_copy_alone(program, error, parts):
    _, draws = program
    draws.san = lambda **options: San(**options, error=error)
    task = draws.tasks(4)["text"]
    shape = dict(blocks=1, width=WIDTH, length=17, vocabulary=None, outputs=LABELS, output_projection=False, head="mlp")
    run = Run(Architecture(**shape, positional="sinusoidal"), task, 0, 1e-3, 1e-6)  # type: ignore[arg-type]
    kinks = tool("kinks")
    with kinks.fresh(torch.float64):
        draws.block(torch.Generator().manual_seed(0), 8, 4)
        found = kinks.course(draws, run, 8)
    assert len(found.apart) == 8
    assert (found.first is not None) == parts
    assert (max(found.apart) > 1e-6) == parts
    assert (0 < found.nearest < 10 * error) == parts
    assert len(kinks.shown("on", found)) == len(kinks.SHOWN) + len(kinks.AFTER) + 5


def test_casts_and_new_tensors_are_float32_again_afterwards(program):
    tool, _ = program
    with tool.fresh(torch.float64, everywhere=True):
        assert torch.zeros(1).float().dtype == torch.zeros(1).dtype == torch.float64
    assert torch.zeros(1).double().float().dtype == torch.zeros(1).dtype == torch.float32
