"""The ways to run one trial: in this process, in workers that may die, as a run of a command."""
