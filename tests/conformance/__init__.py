"""Suites that every engine has to pass, against the real server: start here for a new engine.

``engine.py`` (generation, pauses, labels, keys), ``pieces.py`` (streamed answers),
``commits.py`` (weights), ``kv.py`` (the KV of requests over a commit) and ``streaming.py``
(``weight_sync.apply = "streamed"``). What a third engine needs, in this order:

1. ``engines/<name>.py``: the functions of ``engines.server.Dialect``, a
   ``engines.server.ServerControl``, and how a server of it is started; its lines in
   ``engines/server.py``;
2. ``receive/<name>_plugin.py``, which runs inside the server: a ``receive.commit.Engine`` around
   its model, and a way in for the hello and the commit;
3. a fixture in tests/e2e/test_engine_conformance.py that starts a server with a context of
   ``crowd.CONTEXT`` tokens and describes it by an ``EngineUnderTest``.

A check is a function of an EngineUnderTest; it raises AssertionError with what it saw.
"""
