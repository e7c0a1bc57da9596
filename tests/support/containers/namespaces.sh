#!/bin/sh
# Makes ROOT the root of the namespaces in which it is started, with DATA as Docker's folder, and becomes their first process.
#   unshare --mount --net --pid --ipc --uts --fork sh namespaces.sh ROOT DATA CGROUP MTU
set -eu
root=$1 data=$2 cgroup=$3 mtu=$4
mount --make-rprivate /
# runc changes the root of each container, which the kernel permits only below a root that is a mount.
mount --bind "$root" "$root"
mount --bind "$data" "$root/var/lib/docker"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
# Of version 1 or 2, as the machine has them.
mount --rbind /sys/fs/cgroup "$root/sys/fs/cgroup"
mount --rbind /dev "$root/dev"
for folder in run tmp; do mount -t tmpfs tmpfs "$root/$folder"; done
cd "$root"
pivot_root . mnt
umount -l /mnt
ip link set lo up
exec tini -- dockerd --storage-driver=overlay2 --exec-opt native.cgroupdriver=cgroupfs --cgroup-parent="$cgroup" --mtu="$mtu" \
  --log-level=warn
