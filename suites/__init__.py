"""The paper's research questions as pytest-benchmark suites.

``pytest suites/`` runs each once at size tiny, with its assertions. ``pytest suites/ --benchmark`` measures,
records and saves. ``nestpipe report`` makes tables and figures from what it recorded.
"""
