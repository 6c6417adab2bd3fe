"""The command line: `zrt …`. Answers go to stdout, progress and errors to stderr.

Commands import what they need when they run, so that `zrt status` does not wait for imports that
only `zrt up` needs.

In reading order:

- main.py: the parser, and where each command goes
- commands/: a file each: its arguments, and what it does
- argument_types.py: arguments of the command line, read and checked
- cluster_arguments.py: arguments that name a cluster or its file
- sampling_arguments.py: arguments for a generation's options, from the one table
- question.py: one generation as the command line describes it
- answer.py: an answer as it is printed
- json_output.py: what `--json` prints
- foreground.py: a coroutine, run until it ends or a signal ends it
- preflight.py: what can be told before anything starts: check, plan
- log_lines.py: the lines of a cluster's log
- detach.py: `zrt up --detach`
- notice.py: what a person sees while an answer is on its way

May import: everything; nothing imports it but actors/node/, for what `zrt up` shows.
"""
