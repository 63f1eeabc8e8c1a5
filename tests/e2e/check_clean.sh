#!/usr/bin/env bash
# README's two commands in a fresh Debian 12 root: nothing preinstalled, no GPU. Run on demand as root; not part of CI.
#
# usage: ./dev check-clean [FOLDER]     FOLDER (default: a temporary one) gets the root; it is removed at the end
#                                       unless NEEDLE_KEEP_ROOT=1. The log stays at docs/measured/check-clean.log.
# NEEDLE_CLEAN_CCACHE=FOLDER lends the root a compiler cache; the log says so.
# The Debian mirror is the one that this machine's apt uses.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ "$(id -u)" -eq 0 ] || { echo "check-clean: needs root for debootstrap and chroot" >&2; exit 1; }
command -v debootstrap >/dev/null || apt-get install -y -qq --no-install-recommends debootstrap >/dev/null

root="${1:-$(mktemp -d /var/tmp/needle-clean.XXXXXX)}"
log="$PWD/docs/measured/check-clean.log"
mkdir -p "$(dirname "$log")"
mirror="$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 2>/dev/null | grep -m1 '/debian$' || true)"
mirror="${mirror:-http://deb.debian.org/debian}"

cleanup() {
  for mount in proc sys dev/shm dev/pts dev root/.cache/ccache; do mountpoint -q "$root/$mount" && umount -l "$root/$mount"; done
  [ -n "${NEEDLE_KEEP_ROOT:-}" ] || rm -rf --one-file-system "$root"
}
trap cleanup EXIT

chmod 755 "$root"  # mktemp closes it to every user but root, and tests have other users
debootstrap --variant=minbase bookworm "$root" "$mirror" >/dev/null
cp /etc/resolv.conf "$root/etc/resolv.conf" 2>/dev/null || true
# The mirror's own way of being reached (proxy, credentials) belongs to the machine, not to the project.
find /etc/apt/apt.conf.d /etc/apt/auth.conf.d -maxdepth 1 -type f 2>/dev/null | while read -r file; do
  mkdir -p "$root$(dirname "$file")" && cp "$file" "$root$file"
done
for source in /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list; do
  [ -s "$source" ] && mkdir -p "$root$(dirname "$source")" && cp "$source" "$root$source"
done
mount -t proc proc "$root/proc"
mount -t sysfs sys "$root/sys"
mount --bind /dev "$root/dev"
mkdir -p "$root/dev/shm"
mountpoint -q "$root/dev/shm" || mount -t tmpfs shm "$root/dev/shm"
[ -d /dev/pts ] && mount --bind /dev/pts "$root/dev/pts"  # pseudo-terminals

# What every installed machine has and a bare root lacks.
echo '127.0.0.1 localhost' >"$root/etc/hosts"
if [ -n "${NEEDLE_CLEAN_CCACHE:-}" ]; then
  mkdir -p "$root/root/.cache/ccache"
  mount --bind "$NEEDLE_CLEAN_CCACHE" "$root/root/.cache/ccache"
fi

mkdir -p "$root/src"
git archive HEAD | tar -x -C "$root/src"
{
  echo "# $(date -u +%Y-%m-%d) commit $(git rev-parse --short HEAD), Debian 12 minbase, $(nproc) cores${NEEDLE_CLEAN_CCACHE:+, compiler cache lent}"
  for command in './dev demo' './dev test'; do
    echo "\$ $command"
    begin=$SECONDS
    if chroot "$root" /usr/bin/env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 \
      bash -c "cd /src && $command" 2>&1 | tail -n 60; then
      echo "# exit 0 after $((SECONDS - begin)) s"
    else
      echo "# FAILED after $((SECONDS - begin)) s"
      exit 1
    fi
  done
} >"$log" 2>&1 || { tail -n 40 "$log" >&2; exit 1; }
tail -n 5 "$log"
