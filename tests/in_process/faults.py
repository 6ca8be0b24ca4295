"""What can happen to a message's bytes."""


def flipped(parts: list[bytes], number: int) -> list[bytes]:
    if len(parts) < 2:
        return parts
    payload = bytearray(parts[1])
    payload[number % len(payload)] ^= 1 << number % 8
    return [parts[0], bytes(payload)]


def damaged(parts: list[bytes], number: int, *, has_checksum: bool) -> list[bytes]:
    """Return a message with one thing wrong that its receiver can notice.

    Where payloads have no checksum, as between a processor and its clients, TCP's is trusted: a wrong bit would be a
    wrong token, so parts are cut, lost or doubled, but not changed.
    """
    kind, number = number % 4, number // 4
    if kind == 0 and len(parts) > 1:
        return parts[:-1]
    if kind == 1:
        return [*parts, parts[-1]]
    if kind == 2 and has_checksum:
        return flipped(parts, number)
    place = number % len(parts)
    cut = number // len(parts) % max(1, len(parts[place]))
    return [*parts[:place], parts[place][:cut], *parts[place + 1 :]]
