"ZIP and RAR archives for tests; RAR archives are of version 5, stored, so that no program is needed to read them."

import io
import stat
import zipfile
import zlib
from collections.abc import Mapping


def zip_of(
    files: Mapping[str, bytes], links: Mapping[str, str] = {}, method: int = zipfile.ZIP_DEFLATED
) -> bytes:
    "Pack files and symbolic links by the names as they are given."
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        for name, target in links.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(info, target)
    return out.getvalue()


def _number(value: int) -> bytes:
    "Encode a number of variable length: seven bits in each byte."
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def _block(body: bytes) -> bytes:
    sized = _number(len(body)) + body
    return zlib.crc32(sized).to_bytes(4, "little") + sized


def _text(text: str) -> bytes:
    return _number(len(text.encode())) + text.encode()


def rar_of(
    files: Mapping[str, bytes],
    links: Mapping[str, str] = {},
    *,
    method: int = 0,  # 0: stored; others only claim to be compressed
) -> bytes:
    "Pack files and symbolic links by the names as they are given."
    out = [b"Rar!\x1a\x07\x01\x00", _block(_number(1) + _number(0) + _number(0))]
    for name, data in (*files.items(), *((name, b"") for name in links)):
        facts = _number(4) + _number(len(data)) + _number(0o100644) + zlib.crc32(data).to_bytes(4, "little")
        facts += _number(method << 7) + _number(1) + _text(name)
        extra = b""
        if name in links:
            record = _number(5) + _number(1) + _number(0) + _text(links[name])
            extra = _number(len(record)) + record
        sizes = (_number(len(extra)) if extra else b"") + _number(len(data))
        out += [_block(_number(2) + _number(3 if extra else 2) + sizes + facts + extra), data]
    return b"".join([*out, _block(_number(5) + _number(0) + _number(0))])
