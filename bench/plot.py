"""Time and fraction of the floor against tokens, from the JSON of mega.py: python bench/plot.py result.json out.png"""

import json
import sys


def points_of(rows: list[dict]) -> dict[str, list[tuple]]:
    """(tokens, µs, fraction of the floor) by contender; a peer may be missing in some rows."""
    points: dict[str, list[tuple]] = {}
    for row in rows:
        times = {"deep_moe": row["us"]} | {name: peer["us"] for name, peer in row["peers"].items()}
        for name, us in times.items():
            points.setdefault(name, []).append((row["tokens"], us, row["floor_us"] / us))
    return points


def draw(rows: list[dict], path: str) -> bool:
    """Write the plot; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = sorted({row["shape"] for row in rows})
    figure, axes = plt.subplots(2, len(names), figsize=(5 * len(names), 7), squeeze=False, sharex="col")
    for column, name in enumerate(names):
        mine = sorted((row for row in rows if row["shape"] == name and row["tokens"]), key=lambda row: row["tokens"])
        time_axis, part_axis = axes[0][column], axes[1][column]
        time_axis.plot([row["tokens"] for row in mine], [row["floor_us"] for row in mine], "k--", label="floor")
        for label, points in points_of(mine).items():
            tokens, times, parts = zip(*points, strict=True)
            time_axis.plot(tokens, times, "o-", label=label)
            part_axis.plot(tokens, parts, "o-", label=label)
        time_axis.set(title=f"{name}, {mine[0]['ranks']} rank(s)" if mine else name, ylabel="µs", yscale="log")
        part_axis.set(xlabel="tokens per rank", ylabel="fraction of the floor", ylim=(0, 1.05))
        time_axis.set_xscale("log", base=2)
        time_axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return True


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    with open(sys.argv[1]) as file:
        rows = json.load(file)["rows"]
    if not draw(rows, sys.argv[2]):
        raise SystemExit("matplotlib is not installed: pip install 'deep_moe[bench]'")


if __name__ == "__main__":
    main()
