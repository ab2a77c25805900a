"""The small process in the place of a Python that a launcher starts; see forked.py. Few imports: it starts often."""

import _signal
import _socket
import os
import sys

PASSED_ON = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGQUIT, _signal.SIGUSR1, _signal.SIGUSR2)


def text(value):
    """As JSON, which is imported by others than this one."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{text(key)}:{text(own)}" for key, own in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(text, value)) + "]"
    if isinstance(value, int):
        return str(value)
    plain = value.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(one if one >= " " else f"\\u{ord(one):04x}" for one in plain) + '"'


def line():
    found = b""
    while not found.endswith(b"\n"):
        part = server.recv(100)
        if not part:
            sys.exit("the leader of a process has ended")
        found += part
    return int(found)


server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
server.connect(sys.argv[1])
said = text(
    {
        "pid": os.getpid(),
        "arguments": sys.argv[2:],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "cores": list(os.sched_getaffinity(0)),
    }
)
message = said.encode("utf-8", "surrogateescape") + b"\n"
descriptors = b"".join(number.to_bytes(4, sys.byteorder) for number in range(3))
sent = server.sendmsg([message], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, descriptors)])
server.sendall(message[sent:])
process = line()
for number in PASSED_ON:
    if _signal.getsignal(number) != _signal.SIG_IGN or number == _signal.SIGINT:
        _signal.signal(number, lambda number, frame: os.kill(process, number))
for number in range(3):  # the process has them; who reads them shall see their end
    os.close(number)
status = line()
code = os.waitstatus_to_exitcode(status)
if code < 0:
    _signal.signal(-code, _signal.SIG_DFL) if -code not in (9, 19) else None
    os.kill(os.getpid(), -code)
os._exit(code)
