"""Time and fraction of the floor against tokens, from the JSON of mega.py: python bench/plot.py result.json out.png"""

import json
import sys


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
        tokens = [row["tokens"] for row in mine]
        time_axis, part_axis = axes[0][column], axes[1][column]
        time_axis.plot(tokens, [row["floor_us"] for row in mine], "k--", label="floor")
        contenders = {"deep_moe": [row["us"] for row in mine]}
        for peer in mine[0]["peers"] if mine else ():
            contenders[peer] = [row["peers"][peer]["us"] for row in mine]
        for label, times in contenders.items():
            time_axis.plot(tokens, times, "o-", label=label)
            part_axis.plot(
                tokens, [row["floor_us"] / us for row, us in zip(mine, times, strict=True)], "o-", label=label
            )
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
