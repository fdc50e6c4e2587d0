"""The soak: probes into which faults are injected, and a judge who knows what each may answer.

`plan` draws probes and faults from a seed; `drive` forks a process for each run of a probe and sends it signals; `faults`
are those that happen inside, in a step, a device or a file; `judge` compares with an exhaustive scan of the ledger.
"""
