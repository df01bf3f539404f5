"""Several hosts on one machine: network namespaces with shaped links."""

from nestpipe.testbed.switch import TestbedUnavailable
from nestpipe.testbed.testbed import Testbed, parse_testbed

__all__ = ["Testbed", "TestbedUnavailable", "parse_testbed"]
