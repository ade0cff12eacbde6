"""A part of scripts that tests run in processes of their own: what a forked child does."""

# Needs os, signal and sys. `in_child(check)` is the child's exit status: 0 where `check` raised
# nothing.
FORK = """
def in_child(check):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # ends a child that hangs
        status = 1
        try:
            check()
            status = 0
        except BaseException as error:
            print("child:", repr(error), file=sys.stderr)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
