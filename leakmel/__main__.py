"Run the command line as `python -m leakmel`."

from leakmel.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
