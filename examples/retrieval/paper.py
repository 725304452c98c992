r"""Run tables and figures of the papers on your data, beside the printed figures.

    python -m examples.retrieval.paper --list
    python -m examples.retrieval.paper coder:3 coder:fig3 --seeds 0 1 2
    python -m examples.retrieval.paper user:III --split test \
        --config examples/retrieval/configs/user_f30k.toml \
        data=DIR bert=google-bert/bert-base-uncased

Without --config, the models are those for the drawn scenes. papers.toml lists what each row changes
in the full model, the printed figures and the paper's claims. Below --out there is an ordinary run
directory for each row and seed (paper_runs.py), report.md with verdicts on the claims
(paper_report.py), and for each table a CSV file, for each figure a PNG file and its numbers as CSV.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from .objectives import build_loss
from .paper_report import write_report
from .paper_runs import Grid, run, state
from .paper_tables import PAPERS, load_paper

CONFIGS = Path(__file__).with_name("configs")


def main(arguments: list[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else arguments
    # Removed before parsing: after --seeds 0 1, argparse would take key=value for another seed.
    common = [word for word in words if re.match(r"[a-z_.]+=", word)]
    parser = argparse.ArgumentParser(
        description="Run tables and figures of a paper, and compare them with what it prints.",
        epilog="key=value anywhere: settings of all rows, as for examples.retrieval.train",
    )
    parser.add_argument(
        "tables", nargs="*", metavar="TABLE", help="as coder:3 or dvse:fig7; all of a paper: coder"
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE.toml", help="default: that of the scenes"
    )
    parser.add_argument(
        "--row",
        action="append",
        metavar="NAME",
        help="run this row only, such as 'CODER (BERT)'; may be repeated",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--split",
        default="dev",
        choices=["dev", "test", "test_folds"],
        help="the split that is measured, dev; test_folds: the means over MSCOCO's folds",
    )
    parser.add_argument("--out", type=Path, help="default: runs/paper_CODER and so on")
    doing = parser.add_mutually_exclusive_group()
    doing.add_argument("--list", action="store_true", help="list all tables and figures")
    doing.add_argument("--dry-run", action="store_true", help="list the runs, and run nothing")
    doing.add_argument(
        "--report", action="store_true", help="report on what is finished, and run nothing"
    )
    args = parser.parse_intermixed_args([word for word in words if word not in common])
    if args.list:
        print_tables()
        return
    try:
        paper, only = chosen(args.tables)
        file = args.config or CONFIGS / f"{paper}_scenes.toml"
        out = args.out or Path(f"runs/paper_{paper}")
        seeds = list(dict.fromkeys(args.seeds))
        grid = Grid(paper, file, common, seeds, out, only, args.split, args.row or ())
        for config, _ in grid.runs().values():
            build_loss(config)  # report wrong settings before the first run
        if args.dry_run:
            print_grid(grid)
            return
        if not args.report:
            run(grid)
        print(write_report(grid))
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error))


def chosen(words: Sequence[str]) -> tuple[str, list[str]]:
    """The paper and the numbers of words such as "coder:3"; no number if one is the whole paper."""
    papers = {word.partition(":")[0] for word in words}
    if len(papers) != 1 or not papers <= {*PAPERS}:
        raise ValueError(
            f"TABLE: expected tables of one of {', '.join(PAPERS)}, such as coder:3, got "
            f"{' '.join(words) or 'none'}"
        )
    numbers = [word.partition(":")[2] for word in words]
    return papers.pop(), [] if "" in numbers else numbers


def print_tables() -> None:
    """Print all tables and figures, and what the papers' own figures need."""
    for name in PAPERS:
        paper = load_paper(name)
        print(f"{paper.title}: {paper.needs}")
        for number, table in paper.tables.items():
            needs = f" (needs {table.needs})" if table.needs else ""
            print(f"  {name}:{number:7} {table.kind:12} {table.title}{needs}")


def print_grid(grid: Grid) -> None:
    """Print which rows would be run, and which cannot be."""
    for config, rows in grid.runs().values():
        print(f"{Path(config.out).name}  {state(config):11}  {', '.join(rows)}")
    for number, table in grid.tables.items():
        for name, row in table.rows.items():
            what = f"{row.what}  {' '.join(row.set)}"
            reason = grid.cannot(row)
            if reason:
                what = f"cannot be run: {reason}"
            print(f"{number}: {name}  {what}".rstrip())


if __name__ == "__main__":
    main()
