"""The suite as pytest tests: `pytest --pyargs iha_conformance.suite --iha-target NAME`.

`plugin` has the options and is loaded by every pytest, `session` the targets of one pytest session,
`test_cases` the tests.
"""
