"""A pytest plugin that runs a failing test a second time and reports a failure only if it fails again. Otherwise a
flaky test would seem to catch a mutant that no test detects."""

from _pytest.runner import runtestprotocol


def pytest_runtest_protocol(item, nextitem):
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    # A hang is not retried: pytest-timeout's timer has run out.
    if any(r.failed and "Timeout (>" not in str(r.longrepr) for r in reports):
        print(f"{item.nodeid} failed, and is run again")
        item._initrequest()
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
