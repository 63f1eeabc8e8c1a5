#!/usr/bin/env bash
# same_objects.sh SOURCE_DIR CORE_ARCHIVE SIM_BUILD_DIR
# The simulator links the archive that the daemon links, compiles no core source of its own, and no core source asks
# whether it is simulated.
set -euo pipefail
source_dir=$1 archive=$2 sim_dir=$3
echo "objects of needle_server_core:"
ar t "$archive" | sort | sed 's/^/  /'
for source in $(cd "$source_dir/server" && ls core.cc audit.cc holding.cc loop.cc options.cc pool/*.cc catalog/*.cc journeys/*.cc); do
  ar t "$archive" | grep -qx "$(basename "$source").o" || { echo "$source is not in the archive"; exit 1; }
done
if find "$sim_dir" -name '*.o' -path '*server*' | grep .; then echo "the simulator compiled core sources of its own"; exit 1; fi
if grep -rnE '#\s*if.*(SIM|TEST)' "$source_dir"/server/{core.cc,audit.cc,holding.cc,loop.cc,pool,catalog,journeys}; then
  echo "a core source asks whether it is simulated"; exit 1
fi
