"""What the page shows of behaviour, from the committed results of real models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from measured import close

import probes
from probes.measures.mechanism_numbers import PROFILES, follows
from probes.models.intervene import intervention
from probes.report.behaviour_charts import BEHAVIOUR, followed, interventions
from probes.report.plotting import traces
from probes.report.sections import sections
from probes.results.folder import Collected

LISTS = "reports/llm/mechanism/retrieval/retrieval-smollm2-135m.nc"
SWAPS = "reports/llm/interventions/bos-swap/bos-swap-smollm2-135m.nc"


def test_recall_s_correlations_have_their_intervals():
    ds = probes.load_result(LISTS)
    for present in (ds, ds.drop_vars("kernel")):
        (trace,) = traces(followed({"smol": present}))
        names = [name for name in PROFILES if name in present or name == "log_distance"]
        assert list(trace.y) == [PROFILES[name] for name in names]
        numbers = [follows(present, name) for name in names]
        close(trace.x, [one.value for one in numbers], 1e-3)
        close(np.add(trace.x, trace.error_x.array), [one.high for one in numbers], 5e-3)
        close(np.subtract(trace.x, trace.error_x.arrayminus), [one.low for one in numbers], 5e-3)


def test_every_intervention_is_a_point_at_its_sink_rate_and_cost():
    ds = probes.load_result(SWAPS)
    found = traces(interventions({"smol": ds}))
    assert {trace.meta["quantity"] for trace in found} == set(BEHAVIOUR.values())
    for of, quantity in BEHAVIOUR.items():
        points = {
            name: (x, y)
            for trace in found
            if trace.meta["quantity"] == quantity
            for name, x, y in zip(trace.text, trace.x, trace.y, strict=True)
        }
        assert set(points) == set(map(str, ds["replacement"].values))
        for name, (x, y) in points.items():
            at = ds.sel(replacement=name)
            assert x == pytest.approx(float(at["sink_rate_after"].mean()), rel=1e-3)
            assert y == pytest.approx(float(at[of]), rel=1e-3)
    kinds = {name: trace.meta["kind"] for trace in found for name in trace.text}
    assert kinds["mean@4:keys"] == "keys alone"
    assert all((kinds[name] == "part of it") == (0 < intervention(name).dose < 1) for name in kinds)


def test_the_page_goes_from_recall_to_what_it_follows_and_to_interventions():
    kinds = {"retrieval": LISTS, "mechanism/retrieval": LISTS, "bos-swap": SWAPS, "interventions/bos-swap": SWAPS}
    results = {kind: {"smol": probes.load_result(file)} for kind, file in kinds.items()}
    found = {one.name: one for one in sections(Collected(Path("reports"), results))}
    assert {"recall", "followed"} <= {chart.name for chart in found["retrieval"].charts}
    assert "interventions" in {chart.name for chart in found["bos-swap"].charts}
    for name in ("retrieval", "bos-swap"):
        titles = [table.title for table in found[name].tables]
        assert len({*titles}) == len(titles)
    assert "Mechanism: What it says of recall" in [table.title for table in found["retrieval"].tables]
