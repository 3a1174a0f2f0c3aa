# SPDX-License-Identifier: Apache-2.0
"""The configuration and the profiles that the daemon uses now, which a reload replaces."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from resctrlmond.configuration.config import Config
from resctrlmond.configuration.config_file import ConfigError
from resctrlmond.daemon.startup import Setup, group_settings, needs_restart
from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.service import journal
from resctrlmond.service.message_ids import MessageId
from resctrlmond.workloads.model.event_globs import unmatched
from resctrlmond.workloads.profiles.profile import Profiles, missing_classes

log = logging.getLogger(__name__)


class LiveConfig:
    """The configuration in use. ``read`` and ``read_profiles`` read it, and the profiles. They raise ConfigError."""

    def __init__(
        self, config: Config, setup: Setup, read: Callable[[], Config], read_profiles: Callable[[], Profiles]
    ) -> None:
        self.config = config
        # The keys that a reload does not change are compared with those of the start.
        self._started = config
        self._setup = setup
        self._ctx, self._alerts = setup.manager.context, setup.manager.alerts
        self._read, self._read_profiles = read, read_profiles

    def reload(self) -> bool:
        """Read the configuration again, and apply it. Return False if it is wrong."""
        try:
            new = self._read()
        except ConfigError as error:
            self._report(
                "configuration", f"the new configuration is wrong, and the old one stays in use: {error}", error
            )
            return False
        self._apply(new)
        self._alerts["configuration"] = ""
        return True

    def load_profiles(self, otherwise: str) -> None:
        """Read the profiles. ``otherwise`` is the part of the message for files that are wrong."""
        try:
            self._ctx.config.profiles = self._read_profiles()
        except ConfigError as error:
            self._report("profiles", f"the profiles are wrong, and {otherwise}: {error}", error)
            return
        self._warn_of_missing_classes()
        self._warn_of_unknown_events()
        self._alerts["profiles"] = ""

    def _report(self, alert: str, problem: str, error: ConfigError) -> None:
        log.error("%s", problem, extra=journal.fields(error, message_id=MessageId.CONFIG_REFUSED))
        self._alerts[alert] = problem

    def _warn_of_missing_classes(self) -> None:
        """Log the profiles whose class does not exist. They are used: another program may create the class later."""
        profiles = self._ctx.config.profiles
        if not any(profile.class_ for profile in profiles.by_name.values()):
            return
        try:
            existing = self._ctx.tree.classes()
        except ResctrlError:
            return  # not mounted now
        for problem in missing_classes(profiles.by_name.values(), existing):
            log.warning("%s", problem)

    def _warn_of_unknown_events(self) -> None:
        """Log the globs of events that match no event of this machine: hosts with the same profiles differ."""
        if not any(profile.events for profile in self._ctx.config.profiles.by_name.values()):
            return
        try:
            known = [name for of in self._ctx.tree.capacity() for name in of.events]
        except ResctrlError:
            return  # not mounted now
        for profile in self._ctx.config.profiles.by_name.values():
            if missing := unmatched(profile.events, known):
                text = "%s: events of profile %s match no event of this machine: %s. See: resctrlctl status"
                log.warning(text, profile.origin, profile.name, ", ".join(missing))

    def _apply(self, new: Config) -> None:
        old = self.config
        fixed = [name for name in needs_restart() if getattr(new, name) != getattr(self._started, name)]
        if fixed:
            log.warning("%s changed: to apply it, restart resctrlmond", ", ".join(fixed))
        self.config = new
        if new.groups_mode != old.groups_mode:
            try:
                self._setup.snapshots.set_mode(int(new.groups_mode, 8))
                os.chmod(os.path.join(new.runtime_dir, "exposed"), int(new.groups_mode, 8))
            except (ResctrlError, OSError) as error:
                log.error("cannot apply groups_mode to every folder: %s", error)
        self._ctx.config.settings = group_settings(new)
        journal.set_level(new.log_level)
