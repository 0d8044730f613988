"""Suites that every implementation of one of our seams has to pass, against the real thing: start here for a new one.

``engine.py`` (generation, pauses, labels, keys), ``pieces.py`` (streamed answers) and ``commits.py`` (weights) are for an
inference engine. What a third engine needs, in this order:

1. ``engines/<name>.py`` with the functions of ``engines.dialect.Dialect``, and its line in DIALECTS;
2. ``engines/<name>_control.py``, an ``engines.control.ServerControl``; its line in ``controls.make_control`` and in
   ``detect.questions``;
3. ``engines/launch_<name>.py``, how a server of it is started;
4. ``receive/<name>_plugin.py``, which runs inside the server: a ``receive.engine.Engine`` around its model, and a way in for
   the hello and the commit;
5. a fixture in tests/e2e/test_engine_conformance.py that starts a server with a context of ``crowd.CONTEXT`` tokens and
   describes it by an ``EngineUnderTest``.

A check is a function of an EngineUnderTest; it raises AssertionError with what it saw.
"""
