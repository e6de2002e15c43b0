"""The layout of version 1 of the history of nightly runs: a row for each recording and each night of a sensor."""

import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import astuple
from pathlib import Path

import xxhash

from leakmel.extras.nightly.history import HISTORY_FILE, HistoryEntry

SCHEMA = {
    "meta": (
        "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL CHECK (length(value) < 10000)) STRICT"
    ),
    "recordings": (
        "CREATE TABLE recordings (digest TEXT PRIMARY KEY CHECK (length(digest) = 32), "
        "sensor TEXT NOT NULL CHECK (length(sensor) < 1000), "
        "path TEXT NOT NULL CHECK (length(path) < 20000), "
        "time TEXT NOT NULL CHECK (length(time) < 40), "
        "night TEXT NOT NULL CHECK (date(night) IS night), "
        "score REAL NOT NULL CHECK (score BETWEEN 0 AND 1), "
        "rms_db REAL NOT NULL CHECK (abs(rms_db) < 1000), "
        "floor_db REAL NOT NULL CHECK (abs(floor_db) < 1000), "
        "clipped_share REAL NOT NULL CHECK (clipped_share BETWEEN 0 AND 1), "
        "flags TEXT NOT NULL CHECK (length(flags) < 100), "
        "bands TEXT NOT NULL CHECK (length(bands) < 200)) STRICT"
    ),
    "by_night": ("CREATE INDEX by_night ON recordings (sensor, night)"),
    "by_date": ("CREATE INDEX by_date ON recordings (night)"),
    "files": (
        "CREATE TABLE files (path BLOB PRIMARY KEY CHECK (length(path) < 5000), "
        "size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, "
        "digest TEXT NOT NULL CHECK (length(digest) IN (0, 32)), "
        "problem TEXT NOT NULL CHECK (length(problem) < 60)) STRICT"
    ),
    "nights": (
        "CREATE TABLE nights (sensor TEXT NOT NULL CHECK (length(sensor) < 1000), "
        "night TEXT NOT NULL CHECK (date(night) IS night), "
        "recordings INTEGER NOT NULL CHECK (recordings > 0), "
        "usable INTEGER NOT NULL CHECK (usable BETWEEN 0 AND recordings), "
        "score REAL CHECK (score BETWEEN 0 AND 1), "
        "rms_db REAL NOT NULL CHECK (abs(rms_db) < 1000), "
        "floor_db REAL NOT NULL CHECK (abs(floor_db) < 1000), "
        "flags TEXT NOT NULL CHECK (length(flags) < 100), "
        "n REAL NOT NULL CHECK (n BETWEEN 0 AND 1e6), mean REAL NOT NULL CHECK (abs(mean) < 100), "
        "m2 REAL NOT NULL CHECK (m2 BETWEEN 0 AND 1e9), "
        "r0 REAL NOT NULL CHECK (r0 BETWEEN 0 AND 1e12), "
        "r1 REAL NOT NULL CHECK (r1 BETWEEN 0 AND 1e12), "
        "r2 REAL NOT NULL CHECK (r2 BETWEEN 0 AND 1e12), "
        "first_above TEXT CHECK (date(first_above) IS first_above), PRIMARY KEY (sensor, "
        "night)) STRICT, WITHOUT ROWID"
    ),
    "night_dates": ("CREATE INDEX night_dates ON nights (night)"),
    "visits": (
        "CREATE TABLE visits (sensor TEXT PRIMARY KEY CHECK (length(sensor) < 1000), "
        "night TEXT NOT NULL CHECK (date(night) IS night)) STRICT"
    ),
    "digests": (
        "CREATE TABLE digests (name TEXT PRIMARY KEY, "
        "digest TEXT NOT NULL CHECK (length(digest) = 32)) STRICT, WITHOUT ROWID"
    ),
}


def write_history_of_rows(
    state: Path, entries: Iterable[HistoryEntry], visits: Mapping[str, str], meta: Mapping[str, str]
) -> Path:
    "Write a history as version 1 did; its evidence has no meaning."
    state.mkdir(parents=True)
    entries = [*entries]
    nights = {(h.sensor, h.night) for h in entries}
    with sqlite3.connect(state / HISTORY_FILE) as db:
        for sql in SCHEMA.values():
            db.execute(sql)
        db.execute("PRAGMA application_id = 0x6C6D6E31")
        db.execute("PRAGMA user_version = 1")
        db.executemany(f"INSERT INTO recordings VALUES ({', '.join('?' * 11)})", map(astuple, entries))
        db.executemany(
            "INSERT INTO nights VALUES (?, ?, 1, 1, 0.5, -40, -60, '', 1, 0, 0, 7, 7, 7, '2026-11-05')",
            sorted(nights),
        )
        db.executemany("INSERT INTO visits VALUES (?, ?)", visits.items())
        db.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        db.execute("INSERT INTO files VALUES (?, 9, 1, ?, '')", (b"P1~0.wav", f"{0:032x}"))
        for table in ("meta", "recordings", "files", "nights", "visits"):
            rows = db.execute(f"SELECT * FROM {table}")
            total = sum(xxhash.xxh3_128_intdigest(ascii(row).encode()) for row in rows) % (1 << 128)
            db.execute("INSERT INTO digests VALUES (?, ?)", (table, f"{total:032x}"))
    db.close()
    return state / HISTORY_FILE
