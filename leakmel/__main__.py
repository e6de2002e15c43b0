"Run the command line as `python -m leakmel`."

from leakmel.cli import run_process

if __name__ == "__main__":
    raise SystemExit(run_process())
