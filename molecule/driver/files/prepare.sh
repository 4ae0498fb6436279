#!/bin/sh
# Make a container a GPU host in some state: prepare.sh SYSTEM DRIVER GPUS
#   SYSTEM   debian or ubuntu: whose packages it has
#   DRIVER   none, or a version of NVIDIA's to have installed and running
#   GPUS     a capture: what was recorded of them
set -eu
system=$1 driver=$2 gpus=$3
export DEBIAN_FRONTEND=noninteractive

cp /opt/scenario/stand_in/uname /opt/scenario/stand_in/modinfo /opt/scenario/stand_in/modprobe /usr/local/bin/
cp -r --no-dereference --no-target-directory "/opt/recorded/$gpus" /opt/gpu_host

cat >/etc/systemd/system/repositories.service <<'UNIT'
[Service]
ExecStart=/usr/bin/python3 -m http.server --directory /opt/repositories 8088
UNIT
systemctl daemon-reload
systemctl start repositories.service
rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/* /var/lib/apt/lists/*
echo "deb [signed-by=/opt/repositories/keys/current.gpg] http://localhost:8088/$system/ /" >/etc/apt/sources.list

release=6.1.0-28-amd64 kind=amd64
if [ "$system" = ubuntu ]; then
  release=6.8.0-45-generic kind=generic
  rm -f /etc/os-release
  printf 'ID=ubuntu\nVERSION_ID="24.04"\nVERSION_CODENAME=noble\n' >/etc/os-release
fi
mkdir -p /opt/stand_in /etc/kernel/postinst.d /lib/modules
echo "$release" >/opt/stand_in/kernel
until python3 -c 'import socket; socket.create_connection(("localhost", 8088))' 2>/dev/null; do sleep 0.1; done
apt-get -qq update
apt-get -qq --yes install initramfs-tools mokutil "linux-image-$release" "linux-image-$kind" >/dev/null

rm -rf /opt/gpu_host/proc/driver
if [ "$driver" != none ]; then
  for name in nvidia former; do
    echo "deb [signed-by=/opt/repositories/keys/current.gpg] http://localhost:8088/$name/ /"
  done >/etc/apt/sources.list.d/elsewhere.list
  apt-get -qq update
  apt-get -qq --yes install "linux-headers-$release" dkms >/dev/null
  apt-get -qq --yes install "nvidia-driver-cuda=$driver-1" "libcuda1=$driver-1" "libnvidia-ml1=$driver-1" \
    "firmware-nvidia-gsp=$driver-1" "nvidia-kernel-open-dkms=$driver-1" >/dev/null
  rm /etc/apt/sources.list.d/elsewhere.list
  modprobe nvidia
fi
