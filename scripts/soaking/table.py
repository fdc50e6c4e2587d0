"""What was injected and what came of it, as text."""


def text(tally, arguments, seconds):
    """The report of a soak."""
    outcomes = sorted({word for _, word in tally.outcomes})
    lines = [f"{'fault':34} {'times':>5}  outcomes"]
    for name in sorted({name for name, _ in tally.outcomes}):
        came = ", ".join(f"{word} {tally.outcomes[name, word]}" for word in outcomes if tally.outcomes[name, word])
        lines.append(f"{name:34} {tally.injected[name]:5}  {came}")
    lines.append(
        f"{tally.probes} probes in {tally.runs} runs, {sum(tally.injected.values())} faults injected, "
        f"{tally.missed} never came to happen, {len(tally.violations)} violations, {seconds:.0f} s"
    )
    for seed, number, what in tally.violations:
        again = f"--seed {seed} --probes {arguments.probes} --faults {arguments.faults} --only {number}"
        lines.append(f"\nVIOLATION: scripts/soak {again}\n  {what}")
    return "\n".join(lines)
