"""What every worker is for its first milliseconds: it ties its life to the launcher's, then becomes the script.

Run as a program (``python -I -S bootstrap.py LAUNCHER_PID PROGRAM [ARGUMENT...]``), with the standard library
only. On Linux it asks the kernel to send SIGKILL when the thread that forked it ends (PR_SET_PDEATHSIG): a
launcher that is killed, even by SIGKILL, takes its workers along. The setting survives the exec that follows, so
the script is an ordinary ``python script.py``: same ``sys.argv``, ``sys.path[0]``, ``__file__``, ``__main__``.
Rejected: ``preexec_fn`` (runs Python between fork and exec, unsafe beside torch's threads) and ``runpy`` in
here (the script would see a different ``__main__``, arguments and exit).

The launcher may die before the request is made, and then no signal ever comes; the parent's id tells.
"""

from __future__ import annotations

import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""From ``linux/prctl.h``; see prctl(2)."""

CANNOT_EXECUTE = 126
"""The exit status with which shells say: found, but cannot be executed."""


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends; end now if that has already happened.

    Elsewhere than on Linux only the second half is done, and the guardian does the rest.
    """
    if sys.platform == "linux":
        import ctypes

        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            print("acceler8 launch: prctl failed; a killed launcher may leave this worker", file=sys.stderr)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Tie this process to its parent and become the program of the command line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C this early ends quietly
    program, arguments = sys.argv[2], sys.argv[2:]
    die_with_parent(int(sys.argv[1]))
    # Python ignores these two at its start, and an ignored signal stays ignored across exec.
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    try:
        os.execv(program, arguments)
    except OSError as error:
        print(f"acceler8 launch: cannot execute {program!r}: {error.strerror}", file=sys.stderr)
        sys.exit(CANNOT_EXECUTE)


if __name__ == "__main__":
    main()
