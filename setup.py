"Build the package from settings.ini, so that names, versions and dependencies stand in one place."

from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

_parser = ConfigParser(delimiters=["="], interpolation=None)
_parser.read("settings.ini", encoding="utf-8")
cfg = _parser["DEFAULT"]

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    license="Apache-2.0",
    python_requires=">=" + cfg["min_python"],
    packages=find_packages(include=["leakmel", "leakmel.*"]),
    # An editable installation then names this folder in sys.path, where a package goes before a folder of the same name that an earlier
    # installation left: compiled code stays in its __pycache__.
    package_dir={"": "."},
    package_data={"leakmel": ["notebooks/*.ipynb", "lab/*.json", "__init__.pyi", "py.typed"]},
    install_requires=cfg["requirements"].split(),
    extras_require={
        name.removesuffix("_requirements"): cfg[name].split()
        for name in cfg
        if name.endswith("_requirements")
    },
    entry_points={"console_scripts": [cfg["console_scripts"]]},
)
