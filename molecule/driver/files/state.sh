#!/bin/sh
# Print what a change of the driver may change: packages, holds, files of apt and modprobe, modules, initramfs, timers.
# Helpers that were added for a build stay, and are left out.
dpkg-query --show --showformat '${Package} ${Version} ${db:Status-Abbrev}\n' | grep -E 'nvidia|cuda' | grep -v '^cuda-keyring.* rc'
apt-mark showhold
find /etc/apt /etc/modprobe.d /etc/kernel /etc/systemd/system/vllm-.service.d /usr/share/keyrings -type f 2>/dev/null |
  sort | xargs -r sha256sum
find /lib/modules -name 'nvidia*.ko' | sort | xargs -r sha256sum
find /boot -name 'initrd*' | sort | xargs -r sha256sum
systemctl is-active apt-daily.timer apt-daily-upgrade.timer
nvidia-smi -q -x 2>&1 | sed -n 's/.*<driver_version>//p'
