"""The commands of `pccheckctl`, a module each; `run(arguments)` returns the exit code."""
