"""Whose process is at the other end of a loopback TCP connection: Linux tells the user, TCP itself does not.

The kernel's socket diagnostics answer for one connection in microseconds. The text of /proc/net/tcp says the same, but
every reading walks the whole table of the host, 5 to 20 ms, and Horovod asks some forty things one after the other
before a ring stands; it serves where the diagnostics are not there.
"""

from __future__ import annotations

import socket
import struct

_SOCK_DIAG, _BY_FAMILY, _REQUEST, _ANY_STATE = 4, 20, 1, 0xFFFFFFFF  # linux/sock_diag.h, linux/netlink.h
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port id
_QUERY = struct.Struct("=BBBxI")  # family, protocol, extensions, states; before the connection's id
_ID = struct.Struct("!HH4s12x4s12x4x8s")  # ports, addresses, interface, cookie
_REPLY = struct.Struct("=4x48s12xI")  # inet_diag_msg: id of the connection found, ..., user id
_LOOPBACK, _NO_COOKIE = socket.inet_aton("127.0.0.1"), b"\xff" * 8


def owner_of_connection(client_port: int, server_port: int) -> int | None:
    """User id of the process at the client's end of a connection on 127.0.0.1; None where nothing can be said."""
    try:
        return ask_kernel(client_port, server_port)
    except OSError:  # no such sockets here: another kernel, or a sandbox
        pass
    try:
        with open("/proc/net/tcp") as file:
            return owner_in_table(client_port, server_port, file.read())
    except OSError:
        return None


def ask_kernel(client_port: int, server_port: int) -> int | None:
    """By socket diagnostics. OSError where the kernel does not offer them."""
    wanted = _ID.pack(client_port, server_port, _LOOPBACK, _LOOPBACK, _NO_COOKIE)
    query = _QUERY.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, _ANY_STATE) + wanted
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as sock:
        sock.settimeout(1.0)
        sock.send(_HEADER.pack(_HEADER.size + len(query), _BY_FAMILY, _REQUEST, 1, 0) + query)
        reply = sock.recv(4096)
    if _HEADER.unpack_from(reply)[1] != _BY_FAMILY:
        return None  # an error: no such connection
    found, owner = _REPLY.unpack_from(reply, _HEADER.size)
    # Where there is no such connection the kernel offers a listener on the client's port instead.
    return int(owner) if _ID.unpack(found)[:4] == _ID.unpack(wanted)[:4] else None


def owner_in_table(client_port: int, server_port: int, table: str) -> int | None:
    """By the text of /proc/net/tcp."""
    for line in table.splitlines()[1:]:
        fields = line.split()
        if int(fields[1].split(":")[1], 16) == client_port and int(fields[2].split(":")[1], 16) == server_port:
            return int(fields[7])
    return None
