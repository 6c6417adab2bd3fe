"""The command line: `zrt …`. Answers go to stdout, progress and errors to stderr.

Commands import what they need when they run, so that `zrt status` waits for nothing that only `zrt
up` needs.

In reading order:

- main.py: the parser, and where each command goes
- argument_types.py: words of the command line, read and checked
- commands.py: what each command does
- asking.py: the commands that talk to a running cluster
- preflight.py: what can be told before anything starts: check, plan
- progress.py: bars and figures on a terminal
- log_lines.py: the lines of a cluster's log
- detach.py: `zrt up --detach`

May import: everything; nothing imports it but actors/node/, for what `zrt up` shows.
"""
