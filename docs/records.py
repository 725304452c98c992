"""A Sphinx extension: the figures and tables of the pages are read from records.

A record is a file of ``benchmarks/results``: rows of figures, and how they were measured. A page
calls a function of this module where the figure stands, and shows its record as a tooltip::

    GCE is :figure:`over_infonce("GCE", 0.4)` ahead of InfoNCE.

    .. record-table:: noise_table()

README has the call in a comment after the figure; `test_docs` compares the two.
"""

import functools
import json
import re
import statistics
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from checks import parsed
from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.transforms import Transform
from sphinx.util.docutils import SphinxRole

from benchmarks.sources import code_digest
from itrloss.testing.registry import CHECKS

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
H100 = "gpu_nvidia_h100_80gb_hbm3_"
GPU = tuple(H100 + name for name in ("slot1", "steps_goals"))  # the runs of the engine's last state
# Student's t: half of a 95 % interval in standard errors, by the number of values.
HALF_WIDTH = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}


class Figure(NamedTuple):
    """A figure as a page shows it, and the names of its records."""

    text: str
    records: tuple[str, ...]


class Table(NamedTuple):
    """Rows of cells, the first of which is the header, and the names of its records."""

    rows: list[list[str]]
    records: tuple[str, ...]


def load(name):
    """Return a record as a dictionary."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def rows_of(record, /, **where):
    """Return the rows of a record that have these values.

    Raises:
        ValueError: if there is none.
    """
    found = load(record)
    rows = found.get("rows") or found["figures"]
    chosen = [row for row in rows if all(row.get(key) == x for key, x in where.items())]
    if not chosen:
        raise ValueError(f"{record}: no row has {where}")
    return chosen


@functools.cache
def present_digest():
    """Return the digest of the engine's code; 0.2 s, for hundreds of figures."""
    return code_digest()


def provenance(name):
    """Return how a record was measured, in words."""
    record = load(name)
    about = record.get("machine", record)
    words = [about.get("processor") or about["device"]]
    if about.get("threads"):
        words.append("1 thread" if about["threads"] == 1 else f"{about['threads']} threads")
    day = date.fromisoformat(about["date"])
    words += [f"PyTorch {about['torch']}", f"{day.day} {day:%B %Y}", f"commit {about['commit']}"]
    if _is_older(record, present_digest()):
        words.append("the engine has changed since")
    return f"{', '.join(words)} ({name}.json)"


def of_another_engine():
    """Return the names of the records of time and memory that an earlier engine has."""
    names = sorted(path.stem for path in FOLDER.glob("*.json"))
    digest = present_digest()
    return [name for name in names if _is_older(load(name), digest)]


def _is_older(record, digest):
    return measures_engine(record) and record.get("machine", record).get("engine") != digest


def measures_engine(record):
    """Return whether a record has time or memory, which depend on the engine's code."""
    rows = record.get("rows") or record["figures"]
    return any("seconds" in row or "peak_mb" in row for row in rows)


# ----------------------------------------------------------------------------------------- figures


def number(value, form=".1f"):
    """Return a number with a real minus sign."""
    return format(value, form).replace("-", "−")


def shape_of(row):
    """Return a shape in one line, as in 128 × 128 × 1024."""
    return "\u00a0×\u00a0".join(map(str, row["shape"]))


def spread_of(values, form=".1f"):
    """Return the mean ± standard deviation of values of several seeds, or the one value."""
    if isinstance(values, dict):
        return f"{number(values['mean'], form)} ± {number(values['sd'], form)}"
    if not isinstance(values, list):
        return number(values, form)
    mean = number(statistics.fmean(values), form)
    return f"{mean} ± {number(statistics.stdev(values), form)}" if len(values) > 1 else mean


def value(record, key, form=".1f", scale=1.0, **where):
    """Return the one value of a row; a mean is without its ±."""
    (row,) = rows_of(record, **where)
    found = row[key]
    if isinstance(found, list):
        found = statistics.fmean(found)
    if isinstance(found, dict):
        found = found["mean"]
    return Figure(number(scale * found, form), (record,))


def trained(study, name, after=False, split="dev"):
    """Return RSUM of a model of the example trainer, mean ± standard deviation over seeds."""
    rows, records = rows_of_trainer(study=study, name=name, split=split)
    if "re-ranked" in rows[0]:
        values = rows[0]["re-ranked" if after else "RSUM"]
    else:
        values = rows[after]["RSUM"]
    return Figure(spread_of(values), records)


def first_seed(study, name, after=False):
    """Return RSUM of seed 0 of a model of the example trainer, on development pictures."""
    rows, records = rows_of_trainer(study=study, name=name, split="dev")
    return Figure(number(rows[after]["RSUM"][0]), records)


def rows_of_trainer(**where):
    """Return rows of the example trainer, and the names of the records that have them."""
    rows, records = [], []
    for record in ("trainer", "infonce_trainer", "gce_siglip_trainer"):
        found = [x for x in load(record)["rows"] if where.items() <= x.items()]
        if found:
            rows += found
            records.append(record)
    return rows, tuple(records)


def extent(records, key, form=".1f", scale=1.0, **where):
    """Return the least to the largest value of one case, over all runs of some records."""
    values = []
    for record in records:
        values += [scale * row[key] for row in rows_of(record, **where)]
    least, most = number(min(values), form), number(max(values), form)
    return Figure(least if least == most else f"{least}–{most}", tuple(records))


def ahead_of_infonce(system):
    """Return the lead of a system over InfoNCE, both re-ranked; seed 0 with the code of 0.1.0."""
    study = "systems, seed 0 with the code of 0.1.0"
    (row,) = rows_of("trainer", study=study, name=system)
    rows, records = rows_of_trainer(study="systems", name="InfoNCE", split="dev")
    difference = row["re-ranked"] - rows[1]["RSUM"][0]
    return Figure(number(difference, "+.1f"), ("trainer", *records))


def tried(name, settings, key="RSUM"):
    """Return RSUM of one run of the example trainer with other settings."""
    return value("trainer", key, study="tried", name=name, settings=settings)


def over_infonce(loss, share):
    """Return the difference of RSUM to InfoNCE with a share of wrong pairs, paired by seed, ± half
    of its 95 % interval.
    """
    infonce = {row["seed"]: row["last"] for row in rows_of("noise", loss="InfoNCE", noise=share)}
    rows = rows_of("noise", loss=loss, noise=share)
    differences = [row["last"] - infonce[row["seed"]] for row in rows]
    half = HALF_WIDTH[len(differences)] * statistics.stdev(differences) / len(differences) ** 0.5
    return Figure(f"{number(statistics.fmean(differences), '+.1f')} ± {number(half)}", ("noise",))


def gain(reranker, key, system="mean of all"):
    """Return the gain of a re-ranker: of RSUM, recalls or orders, by own or judged pairs."""
    (row,) = rows_of("judged", reranker=reranker, system=system)
    return Figure(number(row[key][1], "+.1f"), ("judged",))


def corrected_p(reranker, key, system="mean of all"):
    """Return the p of such a gain, corrected by Holm's method over all of the study."""
    (row,) = rows_of("judged", reranker=reranker, system=system)
    return Figure(number(row[key][4], ".2f"), ("judged",))


def interval(row, key):
    """Return such a gain with its 95 % interval: "+7.1 (+2.8 to +11.4)"."""
    _, middle, low, high, _ = row[key]
    return f"{number(middle, '+.1f')} ({number(low, '+.1f')} to {number(high, '+.1f')})"


def gained_by_stopping():
    """Return the largest lead of a best epoch over the last one, in the study of wrong pairs."""
    leads = [row["best"] - row["last"] for row in rows_of("noise")]
    return Figure(number(max(leads)), ("noise",))


def mined(form, noise, to="plain"):
    """Return the difference of RSUM of an option of the study of negatives to another."""
    (row,) = rows_of("negatives", form=form, noise=noise, split="test")
    return Figure(number(row[f"to {to}"]["difference"][0], "+.1f"), ("negatives",))


def claim(paper, table, of):
    """Return a paired difference of the papers' ablations, ± half of its 95 % interval."""
    for row in rows_of("ablations", paper=paper, table=table):
        for found in row.get("differences", ()):
            if found["of"] == of:
                return Figure(half_of(found["difference"]), ("ablations",))
    raise ValueError(f"{paper}, table {table}: no difference {of}")


def half_batch():
    """Return the difference of a batch of 256 to one of 128 in the same number of epochs."""
    (row,) = rows_of("ablations", paper="USER", table="V", row="batch 256")
    return Figure(half_of(row["difference"]), ("ablations",))


def peak(variant, pairs=16384):
    """Return the peak memory of DCL with 512 dimensions on a CPU, in GB."""
    return value("cpu_peak", "peak_mb", ".2g", 1e-3, variant=variant, shape=[pairs, pairs, 512])


def h100_peer(variant, key, form=".1f", scale=1e3):
    """Return milliseconds or GB of a way to compute InfoNCE of 32 768 pairs in bfloat16."""
    where = {"step": "peers", "loss": "infonce", "shape": [32768, 32768, 512]}
    return value(f"{H100}steps_peers", key, form, scale, variant=variant, **where)


def small_mdcl(variant):
    """Return milliseconds of M-DCL of 512 pairs and 16 384 entries on an H100."""
    where = {"step": "small", "loss": "mdcl", "shape": [512, 16384, 512]}
    return value(f"{H100}steps_peers", "seconds", ".2f", 1e3, variant=variant, **where)


def crossover(variant, pairs):
    """Return milliseconds of InfoNCE of so many pairs of 512 dimensions in bfloat16 on an H100."""
    where = {"step": "crossover", "loss": "infonce", "shape": [pairs, pairs, 512]}
    return value(f"{H100}steps", "seconds", ".1f", 1e3, variant=variant, **where)


def correct_on_h100():
    """Return how many cases of an H100 agreed with float64, all of those that it ran."""
    name = f"{H100}steps_goals"
    cases = rows_of(name, step="correct")
    assert all(case["right"] for case in cases)
    return Figure(str(len(cases)), (name,))


def tested_on_h100(outcome):
    """Return how many tests of an H100 failed, passed or were skipped, where they ran to an end."""
    name = f"{H100}steps_peers"
    summaries = [row.get("summary", "") for row in rows_of(name, step="tests")]
    (found,) = [re.search(rf"(\d+) {outcome}", x) for x in summaries if outcome in x]
    return Figure(found[1], (name,))


def half_of(difference):
    """Return a mean difference, ± half of its 95 % interval."""
    return f"{number(difference['mean'], '+.1f')} ± {number(difference['half'])}"


# ------------------------------------------------------------------------------------------- tables

RECALLS = [f"{direction} R@{k}" for direction in ("i2t", "t2i") for k in (1, 5, 10)]


def scenes():
    """RSUM of the systems on the drawn scenes."""
    rows = [["", "RSUM", "re-ranked", "seeds 0, 1, 2"]]
    for row in rows_of("trainer", study="scenes"):
        seeds = ", ".join(map(str, row["seeds"]))
        rows.append([row["name"], spread_of(row["RSUM"]), spread_of(row["re-ranked"]), seeds])
    return Table(rows, ("trainer",))


def recalls(study, split="dev"):
    """Recalls and RSUM of trained models, and below each the same after re-ranking."""
    rows = [["", "", *RECALLS, "RSUM"]]
    models, records = rows_of_trainer(study=study, split=split)
    for row in models:
        after = row["re-ranking"] != "none"
        name = ", ".join(filter(None, [row["name"], row.get("settings")]))
        names = ["", "re-ranked"] if after else [name, ""]
        rows.append([*names, *(spread_of(row[key]) for key in (*RECALLS, "RSUM"))])
    return Table(rows, records)


def final_test():
    """RSUM of the systems on the test pictures."""
    rows = [["", "RSUM", "re-ranked"]]
    for row in rows_of("trainer", study="systems", split="test"):
        if row["re-ranking"] == "none":
            rows.append([row["name"], spread_of(row["RSUM"])])
        else:
            rows[-1].append(spread_of(row["RSUM"]))
    return Table(rows, ("trainer",))


def runs(study):
    """RSUM of single runs, with their settings."""
    rows = rows_of("trainer", study=study)
    names = ["settings"] if study == "improvements" else ["name", "settings"]
    names = [key for key in names if key in rows[0]]
    lines = [[*("" if key == "name" else key for key in names), "RSUM", "re-ranked"]]
    for row in rows:
        after = number(row["re-ranked"]) if "re-ranked" in row else ""
        rsum = number(row["RSUM"])
        if "chosen" in row:
            rsum = f"**{rsum}**"
        lines.append([*(row[key] for key in names), rsum, after])
    return Table(lines, ("trainer",))


def noise_table():
    """RSUM by the share of wrong pairs, and what is lost relative to the same seed without."""
    shares, losses = (0.0, 0.2, 0.4, 0.6), {}
    for row in rows_of("noise"):
        losses.setdefault(row["loss"], {}).setdefault(row["noise"], []).append(row["last"])
    rows = [["loss", *(f"{100 * share:.0f} %" for share in shares)]]
    rows[0] += ["lost at 40 %", "lost at 60 %"]
    for loss, of in sorted(losses.items(), key=lambda x: -statistics.fmean(x[1][0.0])):
        lost = [_lost(of[share], of[0.0]) for share in (0.4, 0.6)]
        rows.append([loss, *(spread_of(of[share]) for share in shares), *lost])
    return Table(rows, ("noise",))


def _lost(noisy, clean):
    shares = [1 - a / b for a, b in zip(noisy, clean, strict=True)]
    return f"{100 * statistics.fmean(shares):.0f} %"


def noise_gains():
    """Differences to InfoNCE of the same seed, with 95 % intervals."""
    shares = (0.0, 0.2, 0.4, 0.6)
    rows = [["loss", *(f"{100 * share:.0f} % wrong" for share in shares)]]
    for loss in dict.fromkeys(row["loss"] for row in rows_of("noise")):
        if loss != "InfoNCE":
            rows.append([loss, *(over_infonce(loss, share).text for share in shares)])
    return Table(rows, ("noise",))


def judged_table(keys, system="mean of all"):
    """Gains of all re-rankers, of the mean of all systems or of one."""
    rows = [["", *(key.replace("R@", "R\\@") for key in keys)]]
    for row in rows_of("judged", system=system):
        if "reranker" in row:
            rows.append([row["reranker"], *(interval(row, key) for key in keys)])
    return Table(rows, ("judged",))


def judged_counts(keys):
    """How many systems have a significant gain / loss."""
    found = {}
    for row in rows_of("judged"):
        if "reranker" in row and row["system"] != "mean of all":
            found.setdefault(row["reranker"], []).append(row)
    rows = [["", *keys]]
    for name, of in found.items():
        cells = []
        for key in keys:
            clear = [row[key][1] for row in of if row[key][4] < 0.05]
            cells.append(f"{sum(x > 0 for x in clear)} / {sum(x < 0 for x in clear)}")
        rows.append([name, *cells])
    return Table(rows, ("judged",))


def judged_systems(reranker, keys):
    """Gains of one re-ranker, system by system."""
    rows = [["", "RSUM before", *keys]]
    for row in rows_of("judged", reranker=reranker):
        if row["system"] != "mean of all":
            before = number(row["RSUM, own pairs"][0])
            rows.append([row["system"], before, *(interval(row, key) for key in keys)])
    return Table(rows, ("judged",))


def negatives_table():
    """What the options of InfoNCE do on the test pictures."""
    head = ["", "wrong", "RSUM", "i2t R\\@1", "t2i R\\@1"]
    rows = [[*head, "to plain", "over pictures", "over seeds"]]
    for row in rows_of("negatives", split="test"):
        cells = [row["form"], f"{100 * row['noise']:.0f} %"]
        cells += [number(statistics.fmean(row[key])) for key in ("rsum", "i2t_r1", "t2i_r1")]
        rows.append([*cells, *_intervals(row.get("to plain"))])
    return Table(rows, ("negatives",))


def negatives_differences():
    """Other differences of the same study."""
    rows = [["", "wrong", "difference", "over pictures", "over seeds"]]
    for row in rows_of("negatives", split="test"):
        for key, found in row.items():
            if key.startswith("to ") and key != "to plain":
                name = f"{row['form']} − {key.removeprefix('to ')}"
                rows.append([name, f"{100 * row['noise']:.0f} %", *_intervals(found)])
    return Table(rows, ("negatives",))


def _intervals(found):
    if found is None:
        return ["", "", ""]
    ends = [" to ".join(number(x, "+.1f") for x in found[key]) for key in ("pictures", "seeds")]
    return [number(found["difference"][0], "+.1f"), *ends]


def negatives_tried():
    """The values that were tried on the development pictures."""
    rows = [["", "tried", "RSUM, 0 %", "RSUM, 20 %"]]
    for row in rows_of("negatives", split="dev"):
        rows.append([row["form"], f"``{row['options']}``", *map(number, row["rsum"])])
    return Table(rows, ("negatives",))


def ratios(name, losses=None):
    """Times of the variants of each case, as ratios; of these losses, or of all."""
    rows = [["loss", "shape", "eager / ours", "compiled / ours", "ours / bound", "eager / bound"]]
    for (loss, shape), of in cases(name).items():
        if losses is not None and loss not in losses:
            continue
        cells = [of["eager"]["to ours"], of["eager compiled"]["to ours"]]
        cells += [of["ours"]["to matmul_bound"], of["eager"]["to matmul_bound"]]
        rows.append([loss, shape, *(f"{x:.2f}" for x in cells)])
    return Table(rows, (name,))


def peers(name):
    """Time, memory and error of other libraries, by case."""
    rows = [["case", "", "time / ours", "peak MB", "gradient error"]]
    for (loss, shape), of in cases(name).items():
        case = f"{loss} {shape}"
        for variant, row in of.items():
            if "error" not in row:
                memory = f"{row['peak_mb']:.0f}" if "peak_mb" in row else ""
                error = f"{row['gradient error']:.0e}" if "gradient error" in row else ""
                rows.append([case, variant, f"{row['to ours']:.2f}", memory, error])
                case = ""
    return Table(rows, (name,))


def cases(name):
    """Return the rows of each case of a record by their variants."""
    found = {}
    for row in rows_of(name):
        shape = shape_of(row)
        found.setdefault((row["loss"], shape), {})[row["variant"]] = row
    return found


# case of the GPU's records: title, loss, shape
GPU_CASES = (
    ("InfoNCE", "infonce", [32768, 32768, 512]),
    ("InfoNCE", "infonce", [32768, 32768, 1024]),
    ("InfoNCE, learnt temperature", "infonce learnable", [32768, 32768, 512]),
    ("InfoNCE, learnt temperature", "infonce learnable", [32768, 32768, 1024]),
    ("SigLIP", "siglip", [65536, 65536, 768]),
    ("DCL", "dcl std", [32768, 32768, 1024]),
    ("HAL", "hal", [32768, 32768, 1024]),
)


def gpu():
    """Milliseconds, TFLOP/s, their share of bare products, and MB on an H100."""
    rows = [["loss", "pairs × D", "ms", "as a CUDA graph", "TFLOP/s", "share", "MB"]]
    for title, loss, shape in GPU_CASES:
        where = {"step": "goals", "shape": shape}
        ours = {**where, "loss": loss, "variant": "triton"}
        graphed = {**ours, "variant": "triton graphed"}
        cells = [
            extent(GPU, "seconds", scale=1e3, **ours),
            extent(GPU, "seconds", scale=1e3, **graphed),
            extent(GPU, "gflops", ".0f", 1e-3, **graphed),
            share_of_products(graphed),
            extent(GPU, "peak_mb", ".0f", **ours),
        ]
        rows.append([title, f"{shape[0]}²\u00a0×\u00a0{shape[2]}", *(cell.text for cell in cells)])
    return Table(rows, GPU)


def share_of_products(ours):
    """Return the throughput of ours as a percentage of that of bare products, as CUDA graphs."""
    shares = []
    for record in GPU:
        bare = rows_of(record, **{**ours, "loss": "products", "variant": "matmul_bound"})[0]
        shares += [100 * row["gflops"] / bare["gflops"] for row in rows_of(record, **ours)]
    least, most = (number(x, ".0f") for x in (min(shares), max(shares)))
    return Figure(f"{least} %" if least == most else f"{least}–{most} %", GPU)


def gpu_peers():
    """Time and memory of other libraries on an H100."""
    name = f"{H100}steps_peers"
    rows = [["case", "", "ms", "MB"]]
    found = {}
    for row in rows_of(name, step="peers"):
        if "seconds" in row and "loss" in row:
            shape = shape_of(row)
            found.setdefault(f"{row['loss']} {shape}", []).append(row)
    for case, of in found.items():
        for row in of:
            memory = number(row["peak_mb"], ".0f") if "peak_mb" in row else ""
            rows.append([case, row["variant"], number(1e3 * row["seconds"]), memory])
            case = ""
    return Table(rows, (name,))


def encoders(variant):
    """Return milliseconds of a step of two encoders of the size of ViT-B/32 with InfoNCE."""
    return value(GPU[0], "seconds", ".0f", 1e3, loss="ViT-B/32 + infonce", variant=variant)


def gpu_steps():
    """The steps of all runs on a GPU that failed, took too long or found a goal unmet."""
    rows = [["run", "commit", "what failed", "goals met"]]
    names = [path.stem for path in sorted(FOLDER.glob(f"{H100}*.json"))]
    for name in names:
        record = load(name)
        failed = [f"{x['name']} (status {x['rc']})" for x in record["steps"] if x.get("rc")]
        goals = [goal["met"] for goal in record["goals"] if goal["met"] is not None]
        met = f"{sum(goals)} of {len(goals)}" if goals else ""
        failures = ", ".join(failed) or "nothing"
        rows.append([name.removeprefix(H100), record["commit"], failures, met])
    return Table(rows, tuple(names))


def processes():
    """Seconds of a step in one process and in two."""
    losses = ("InfoNCE", "SigLIP", "DCL")
    found = {}
    for row in rows_of("cpu_processes"):
        found.setdefault(row["how"], {})[row["loss"]] = f"{row['seconds']:.2f}"
    rows = [[how, *(of.get(loss, "") for loss in losses)] for how, of in found.items()]
    return Table([["", *losses], *rows], ("cpu_processes",))


def mining():
    """Seconds and memory of finding hard negatives in a corpus."""
    rows = [["", "seconds", "time / ours", "MB"]]
    for row in rows_of("cpu_mining"):
        cells = (f"{row['seconds']:.2f}", f"{row['to ours']:.2f}", number(row["peak_mb"], ".0f"))
        rows.append([row["way"], *cells])
    return Table(rows, ("cpu_mining",))


def indices():
    """What approximate indices return of the exact best."""
    keys = ("of the ten best", "the best")
    rows = [["index", *keys]]
    for row in rows_of("rerankers", study="index"):
        rows.append([f"``{row['index']}``", *(f"{row[key]} %" for key in keys)])
    return Table(rows, ("rerankers",))


def reranked_models():
    """RSUM of trained models with every re-ranker."""
    rows = [["", "references", "USER", "change (95 %)", "skewness", "CODER", "CLIP"]]
    for row in rows_of("rerankers", study="trained models"):
        cells = [row["method"], row["references"], number(row["USER"]), ""]
        if "change" in row:
            middle, low, high = (number(x, "+.1f") for x in row["change"])
            cells[-1] = f"{middle} ({low} to {high})"
        cells.append(", ".join(number(x, ".2f") for x in row["skewness"]))
        cells += [number(row[key]) if key in row else "" for key in ("CODER", "CLIP")]
        rows.append(cells)
    return Table(rows, ("rerankers",))


def reranking_cost():
    """Seconds of re-ranking and all metrics."""
    rows = [["method", "seconds"]]
    for row in rows_of("cpu_rerank_command"):
        rows.append([row["method"], number(row["seconds"])])
    return Table(rows, ("cpu_rerank_command",))


def peaks():
    """Peak memory of DCL by the number of pairs."""
    rows = [["pairs", "itrloss, MB", "plain PyTorch, MB"]]
    found = {}
    for row in rows_of("cpu_peak"):
        found.setdefault(row["shape"][0], {})[row["variant"]] = number(row["peak_mb"], ".0f")
    rows += [[str(n), of["ours"], of["eager"]] for n, of in found.items()]
    return Table(rows, ("cpu_peak",))


def ablation(paper, table):
    """One table of a paper's ablations."""
    rows = [["row", "", "RSUM", "re-ranked", "difference", "printed"]]
    for row in rows_of("ablations", paper=paper, table=table):
        if "row" in row:
            name = f"**{row['row']}**" if "reference" in row else row["row"]
            cells = [_spread_or_empty(row["RSUM"]), _spread_or_empty(row["re-ranked"])]
            cells.append(half_of(row["difference"]) if "difference" in row else "")
            printed = number(row["printed"], "+.1f") if row.get("printed") is not None else ""
            rows.append([name, row["about"], *cells, printed])
    return Table(rows, ("ablations",))


def _spread_or_empty(values):
    return "" if values is None else spread_of(values)


def claims(paper, table):
    """What the table of a paper claims, whether it holds, and by which differences."""
    rows = [["claim", "verdict", "our differences (printed)"]]
    for row in rows_of("ablations", paper=paper, table=table):
        if "claim" in row:
            parts = []
            for found in row["differences"]:
                text = f"{found['of']}: "
                text += half_of(found["difference"]) if "difference" in found else "not run"
                if "of recall" in found:
                    text += f" {found['of recall']}"
                if "printed" in found:
                    text += f" ({', '.join(number(x, '+.1f') for x in found['printed'])})"
                parts.append(text)
            rows.append([row["claim"], f"**{row['verdict']}**", "; ".join(parts)])
    return Table(rows, ("ablations",))


def conformance():
    """Which checks each loss of other libraries failed."""
    rows = [["loss, package", "failed"]]
    for row in rows_of("conformance"):
        names = [f"``{name}``" for name in row.get("failed", ()) if name in CHECKS]
        failed = ", ".join(names) or "none"
        rows.append([f"{row['loss']} ({row['package']})", row.get("error", failed)])
    return Table(rows, ("conformance",))


def all_records():
    """All records: how and when they were measured."""
    names = sorted(path.stem for path in FOLDER.glob("*.json"))
    return Table([["record"], *([provenance(name)] for name in names)], ())


# ------------------------------------------------------------------------------------------- Sphinx


def called(expression):
    """Return the figure or table of an expression of a page."""
    return eval(expression, dict(globals()))


def note_dependencies(environment, records):
    """Have a page built again when its records change, or what is made of them."""
    environment.note_dependency(__file__)
    for name in records:
        environment.note_dependency(str(FOLDER / f"{name}.json"))


class FigureRole(SphinxRole):
    """A figure within a text, with its record as a tooltip."""

    def run(self):
        figure = called(self.text)
        about = "; ".join(map(provenance, figure.records))
        note_dependencies(self.env, figure.records)
        return [nodes.abbreviation(figure.text, figure.text, explanation=about)], []


class RecordTable(Directive):
    """``.. record-table:: EXPRESSION`` has the rows, and below them how they were measured. The
    option ``widths`` is that of csv-table.
    """

    required_arguments = 1
    final_argument_whitespace = True
    option_spec = MappingProxyType({"widths": str})

    def run(self):
        table = called(self.arguments[0])
        environment = self.state.document.settings.env
        note_dependencies(environment, table.records)
        lines = csv_table(table.rows, self.options.get("widths"))
        shown = environment.temp_data.setdefault("records", set())  # each once a page
        for name in table.records:
            if name not in shown:
                lines += [".. rst-class:: legend", "", f"{provenance(name)}.", ""]
            shown.add(name)
        return parsed(self, lines)


def csv_table(rows, widths=None):
    """Return the lines of a directive with rows of text, the first of which is the header."""
    quoted = [", ".join('"{}"'.format(text.replace('"', '""')) for text in row) for row in rows]
    options = [f"   :header: {quoted[0]}", *([f"   :widths: {widths}"] if widths else [])]
    return [".. csv-table::", *options, "", *(f"   {x}" for x in quoted[1:]), ""]


class Recalls(Transform):
    """R@10 is a recall, and no e-mail address, which docutils makes a link of."""

    default_priority = 900

    def apply(self):
        for link in list(self.document.findall(nodes.reference)):
            if link.get("refuri", "").startswith("mailto:"):
                link.replace_self(link.children)


def setup(app):
    """Register the extension."""
    app.add_role("figure", FigureRole())
    app.add_transform(Recalls)
    app.add_directive("record-table", RecordTable)
    return {"parallel_read_safe": True}
