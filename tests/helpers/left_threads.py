"Threads that an operation started and has to end."

import threading

# They stay for the next prediction of the process: see _scoring_threads of leakmel.detector.model.detector.
_KEPT = "leakmel-score"


def left_threads() -> set[threading.Thread]:
    "Running threads of leakmel, without those that stay on purpose."
    names = {t: t.name for t in threading.enumerate()}
    return {t for t, name in names.items() if name.startswith("leakmel") and not name.startswith(_KEPT)}
