"Name rules of the public sets: label, group and what is left out."

from each import each

from leakmel.extras.sets.fetch import SETS

CASES = [
    # both hydrophones, with and without noise: one physical test
    ("aghashahi", "Hydrophone/Branched/BR_CC_0.18 LPS_N_H1.raw", "LEAK", "BR_CC_0.18 LPS"),
    ("aghashahi", "BR_CC_0.18 LPS_N_H2.raw", "LEAK", "BR_CC_0.18 LPS"),
    ("aghashahi", "LO_NL_ND_NN_H2.raw", "NOLEAK", "LO_NL_ND"),
    ("aghashahi", "LO_NL_ND_N_H1.raw", "NOLEAK", "LO_NL_ND"),
    ("aghashahi", "LO_OL_Transient_H1.raw", "LEAK", "LO_OL_Transient"),
    ("aghashahi", "Background Noise_H1.raw", "", "background"),
    ("aghashahi", "BR_CC_0.18 LPS_A1.csv", None, None),
    ("aghashahi", "BR_CC_0.18 LPS_A1.raw", None, None),
    ("aghashahi", "BR_XX_ND_N_H1.raw", None, None),
    # the second w0-w1 and the number are not part of the group
    (
        "dongguan",
        "leak acoustic data.rar/pe-zone 2-0.305 MPa-1.6 ms-noise logger-0-1.wav",
        "LEAK",
        "pe-zone 2-0.305 MPa-1.6 ms-noise logger",
    ),
    (
        "dongguan",
        "leak/pe-zone 2-0.305 MPa-1.6 ms-noise logger_4-5_12.wav",
        "LEAK",
        "pe-zone 2-0.305 MPa-1.6 ms-noise logger",
    ),
    (
        "dongguan",
        "no leak acoustic data.rar/steel-zone 1-NA-NA-noise logger_3-4.wav",
        "NOLEAK",
        "steel-zone 1-NA-NA-noise logger",
    ),
    (
        "dongguan",
        "environmental noise/hydrant_normal-NA-noise logger_1-2.wav",
        "NOISE",
        "hydrant_normal-NA-noise logger",
    ),
    ("dongguan", "leak/no_leak/pe-NA-NA-NA-hydrophone-0-1.wav", "NOLEAK", "pe-NA-NA-NA-hydrophone"),
    # a name that is not known gives no label, whatever is around it
    ("dongguan", "clips/pe-NA-NA-NA-hydrophone-0-1.wav", "", "pe-NA-NA-NA-hydrophone"),
    (
        "dongguan",
        "Acoustic Leak Detection Data/Normal/pe-NA-NA-NA-hydrophone-0-1.wav",
        "",
        "pe-NA-NA-NA-hydrophone",
    ),
    ("dongguan", "Non-leak/pe-NA-NA-NA-hydrophone-0-1.wav", "NOLEAK", "pe-NA-NA-NA-hydrophone"),
    ("dongguan", "without leakage.zip/pe-NA-NA-NA-hydrophone-0-1.wav", "NOLEAK", "pe-NA-NA-NA-hydrophone"),
    ("dongguan", "no noise/pe-NA-NA-NA-hydrophone-0-1.wav", "", "pe-NA-NA-NA-hydrophone"),
    ("hongkong-hydrophones", "Leak/Normal/1.1.02.0345.wav", "", "1.1"),
    ("hongkong-loggers", "Acoustic Leak Detection Data.zip/003_05593-20180927.wav", "", "05593"),
    ("hongkong-loggers", "003_05593-20180927.wav", "", "05593"),
    ("dongguan", "leak/pe-NA-NA-NA-hydrophone-0-3.wav", None, None),
    ("dongguan", "no leak acoustic data/desktop.ini", None, None),
    ("hongkong-hydrophones", "Hydrophones/Leak/1.1.02.0345.wav", "LEAK", "1.1"),
    ("hongkong-hydrophones", "Hydrophones/No-Leak/3.3.01.0400.WAV", "NOLEAK", "3.3"),
    ("hongkong-hydrophones", "Noise Loggers/Leak-Metal/003_05593-20180927.wav", None, None),
    ("hongkong-loggers", "Noise Loggers/Leak-NonMetal/003_05593-20180927.wav", "LEAK", "05593"),
    ("hongkong-loggers", "Noise Loggers/No-Leak/104_05593-20180928.wav", "NOLEAK", "05593"),
    ("hongkong-loggers", "Accelerometers/Leak/00241_20180818_1445.xlsx", None, None),
]


@each(("name", "path", "label", "group"), CASES)
def test_names_give_label_and_group(name: str, path: str, label: str | None, group: str | None) -> None:
    found = SETS[name].parse(path.split("/"))
    assert (found and found.label, found and found.group) == (label, group)


def test_columns_do_not_give_the_label_away() -> None:
    "Pressure and flow of the Dongguan set are known for leaks only."
    for path in (
        "leak/pe-zone 2-0.305 MPa-1.6 ms-noise logger-0-1.wav",
        "no leak/pe-zone 2-NA-NA-noise logger_0-1.wav",
    ):
        found = SETS["dongguan"].parse(path.split("/"))
        assert found is not None
        expected = {"device": "noise logger", "material": "pe", "region": "zone 2", "window": "0-1"}
        assert dict(found.columns) == expected


def test_harder_groupings_and_licences_are_given() -> None:
    columns = SETS["aghashahi"].parse(["BR_CC_0.18 LPS_N_H1.raw"])
    assert columns is not None
    assert {"topology", "flow"} <= set(columns.columns)
    assert {s.doi for s in SETS.values()} == {
        "10.17632/tbrnp6vrnj.1",
        "10.5281/zenodo.18631450",
        "10.17632/hkn8mxcjyz.1",
    }
    for s in SETS.values():
        assert s.licence.startswith("CC BY 4.0")
        assert s.doi in s.citation
        assert s.faults
        assert s.groupings[:2] == ("recording", "group")
