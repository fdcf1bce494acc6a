"""Snapshots of processes that know nothing of checkpoints, with a real CRIU.

targets/ has the programs: each prints one line a step, and appends the line to a file, so that
a restored run can be compared with one that was never stopped. cases.py names them with their
words, ways.py takes and restores snapshots (pccheckctl, or CRIU alone, to compare with), runs.py
does one round, and `python -m tests.transparent` (`make transparent-check`) does all, as root.
"""
