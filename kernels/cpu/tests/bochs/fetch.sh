#!/usr/bin/env bash
# Unpacks Debian 13's Bochs 3.0 and the libraries it needs into a folder; nothing is installed. About 350 MB there.
#
#   fetch.sh FOLDER
#
# Uses this machine's own Debian mirror with the suite's name replaced. Exit 3: no such mirror here, or it does not answer.
set -euo pipefail
root=$(realpath -m "$1")
lacking() { echo "bochs: $1" >&2; exit 3; }
[ ! -x "$root/usr/bin/bochs-bin" ] || exit 0
command -v apt-get >/dev/null && command -v dpkg >/dev/null || lacking "fetching it needs apt-get and dpkg"
sources=/etc/apt/sources.list.d/debian.sources
[ -s "$sources" ] || lacking "no Debian mirror is named in $sources"
mkdir -p "$root"/{lists/partial,cache/archives/partial,packages}
mirror=$(awk '$1 == "URIs:" { print $2; exit }' "$sources")
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" >"$root/sources.list"
options=(-q -o Dir::Etc::sourcelist="$root/sources.list" -o Dir::Etc::sourceparts=- -o Dir::State::lists="$root/lists"
         -o Dir::Cache="$root/cache" -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o APT::Sandbox::User=root)
apt-get "${options[@]}" update >"$root/log" 2>&1 || lacking "the mirror's package list could not be read (see $root/log)"
names=$(apt-cache "${options[@]}" depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces \
        --no-enhances bochs bochs-term | grep -E '^lib[a-z0-9.+-]+$' | grep -v sdl | sort -u)  # SDL's display ends a run without one
(cd "$root/packages" && apt-get "${options[@]}" download bochs bochs-term bochsbios vgabios $names >>"$root/log" 2>&1) ||
  lacking "a package could not be fetched (see $root/log)"
for package in "$root"/packages/*.deb; do dpkg -x "$package" "$root"; done
rm -r "$root"/{lists,cache,packages,sources.list}
[ -x "$root/usr/bin/bochs-bin" ] || lacking "the packages hold no bochs-bin"
