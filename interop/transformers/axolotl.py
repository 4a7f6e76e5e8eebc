"""Axolotl's plugin, which the entry point in the group "axolotl.plugins" names: `experts_implementation: moeblaze`.

Axolotl imports it before it checks the config, and the import of this package has then registered the name.
"""

from axolotl.integrations.base import BasePlugin


class MoeblazePlugin(BasePlugin):  # type: ignore[misc]  # Axolotl ships no types
    """A plugin that changes nothing else."""
