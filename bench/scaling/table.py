#!/usr/bin/env python3
"""The runs of run.sh as a table in Markdown; with --best W, the number of data cores that served W workers best."""

import json
import pathlib
import re
import sys


def main():
    folder = pathlib.Path(sys.argv[1])
    runs = exchanges(folder)
    if "--best" in sys.argv:
        workers = int(sys.argv[sys.argv.index("--best") + 1])
        of_these = {k: run for (w, k), run in runs.items() if w == workers}
        if not of_these:
            sys.exit(f"error: no run with {workers} workers in {folder}")
        print(max(of_these, key=lambda k: of_these[k]["goodput_gb_s"]))
        return
    print("ResNet-50, loopback TCP, one server: goodput in GB/s (as a fraction of the loopback limit of the same run)\n")
    cores = sorted({k for _, k in runs})
    print("| workers | " + " | ".join(f"{k} data core{'s' * (k > 1)}" for k in cores) + " |")
    print("| --- |" + " --- |" * len(cores))
    for workers in sorted({w for w, _ in runs}):
        cells = [cell(runs.get((workers, k))) for k in cores]
        print(f"| {workers} | " + " | ".join(cells) + " |")
    for path in sorted(folder.glob("against-gloo-*.json")):
        show_peers(json.loads(path.read_text()))


def exchanges(folder):
    """By workers and data cores."""
    found = {}
    for path in folder.glob("exchange-w*-k*.json"):
        workers, cores = map(int, re.fullmatch(r"exchange-w(\d+)-k(\d+)", path.stem).groups())
        found[workers, cores] = json.loads(path.read_text())
    return found


def cell(run):
    return f"{run['goodput_gb_s']:.2f} ({run['fraction_of_limit']:.2f})" if run else "–"


def show_peers(run):
    print(f"\n{run['workers']} workers, {run['cores']} data cores, in turns ({run.get('congestion', '')}):\n")
    print("| who | GB/s | ours is |")
    print("| --- | --- | --- |")
    print(f"| Paramill | {run['goodput_gb_s']:.2f} | |")
    for peer in run["peers"]:
        print(f"| {peer['name']} | {peer['goodput_gb_s']:.2f} | {peer['ratio']:.2f}x |")


if __name__ == "__main__":
    main()
