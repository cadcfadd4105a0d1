"""Which addresses a process and its children listen at, from /proc alone."""

from pathlib import Path

_LISTEN = "0A"


def listening_addresses(process: int) -> set[str]:
    """The local addresses, without ports, at which the process and all below it accept TCP connections."""
    inodes = {inode for one in _family(process) for inode in _socket_inodes(one)}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and fields[9] in inodes:
                found.add(_show(fields[1].partition(":")[0]))
    return found


def _family(process: int) -> list[int]:
    below: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has ended meanwhile
                continue
            below.setdefault(parent, []).append(int(folder.name))
    family = [process]
    for one in family:
        family += below.get(one, [])
    return family


def _socket_inodes(process: int) -> list[str]:
    found = []
    try:
        for entry in Path(f"/proc/{process}/fd").iterdir():
            target = str(entry.readlink())
            if target.startswith("socket:["):
                found.append(target[8:-1])
    except OSError:  # it has ended meanwhile
        pass
    return found


def _show(word: str) -> str:
    """An address as the kernel prints it (words of four bytes, each in the machine's order), readable."""
    raw = b"".join(bytes.fromhex(word[i : i + 8])[::-1] for i in range(0, len(word), 8))
    if len(raw) == 4 or raw.startswith(bytes(10) + b"\xff\xff"):
        return ".".join(map(str, raw[-4:]))
    return {bytes(16): "::", bytes(15) + b"\x01": "::1"}.get(raw, raw.hex(":", 2))
