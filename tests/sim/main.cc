// needle_sim: runs seeds of the simulator.
//
//   needle_sim --seed N                 one run; on a violation its history, and the smallest set of faults that shows it
//   needle_sim --seeds A..B             many; stops at the first violation and prints its seed
//   needle_sim --operations N           requests a run before everything heals (default 500)
//   needle_sim --faults a,b,c           only these kinds (default all; `none`); see --list-faults
//   needle_sim --history                prints the history also when nothing went wrong
//   needle_sim --lines N                last N lines of history to print (default 60; 0: all)
//   needle_sim --probes                 branches reached over all seeds, and those never reached
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>

#include <unistd.h>

#include "tests/sim/world.h"

namespace needle::sim {
namespace {

struct Arguments {
  uint64_t first_seed = 1;
  uint64_t last_seed = 1;
  int64_t operations = 500;
  Faults faults;
  bool prints_history = false;
  bool prints_probes = false;
  int64_t lines = 60;
};

struct Outcome {
  Totals totals;
  std::optional<std::string> violation;
  std::vector<std::string> history;
};

// A NEEDLE_CHECK in the core aborts the process: the seed must be told even then. Written before each run.
char g_running[96];  // NOLINT: the only way to reach a signal handler

void tell_seed(int) {
  const ssize_t ignored = write(2, g_running, strlen(g_running));
  (void)ignored;
  _exit(3);
}

Outcome run_seed(uint64_t seed, const Arguments& arguments, bool keeps_history) {
  std::snprintf(g_running, sizeof(g_running), "needle_sim: a check failed in seed %llu: --seed %llu --operations %lld\n",
                static_cast<unsigned long long>(seed), static_cast<unsigned long long>(seed), static_cast<long long>(arguments.operations));
  Outcome outcome;
  World world(seed, arguments.faults, arguments.operations, keeps_history);
  try {
    world.begin();
    outcome.totals = world.run();
  } catch (const Violation& violation) {
    outcome.violation = violation.what;
  }
  outcome.history = world.history();
  return outcome;
}

void print_history(const std::vector<std::string>& history, int64_t lines) {
  const size_t from = lines > 0 && history.size() > static_cast<size_t>(lines) ? history.size() - static_cast<size_t>(lines) : 0;
  if (from > 0) std::printf("  ... %zu earlier lines, --lines 0 shows them\n", from);
  for (size_t line = from; line < history.size(); ++line) std::printf("  %s\n", history[line].c_str());
}

std::string names_of(const Faults& faults) {
  std::string names;
  for (const auto& [name, field] : Faults::table()) {
    if (faults.*field) names += (names.empty() ? "" : ",") + name;
  }
  return names.empty() ? "none" : names;
}

// Fewer operations first, then fewer kinds of fault, as long as some violation remains.
Arguments shrink(uint64_t seed, Arguments arguments) {
  const auto still_fails = [&](const Arguments& tried) { return run_seed(seed, tried, false).violation.has_value(); };
  for (int64_t operations = arguments.operations / 2; operations >= 5; operations /= 2) {
    Arguments tried = arguments;
    tried.operations = operations;
    if (!still_fails(tried)) break;
    arguments = tried;
  }
  for (const auto& [name, field] : Faults::table()) {
    if (!(arguments.faults.*field)) continue;
    Arguments tried = arguments;
    tried.faults.*field = false;
    if (still_fails(tried)) arguments = tried;
  }
  return arguments;
}

bool parse_faults(const std::string& list, Faults& faults) {
  for (const auto& [name, field] : Faults::table()) faults.*field = false;
  if (list == "none") return true;
  size_t at = 0;
  while (at <= list.size()) {
    const size_t comma = std::min(list.find(',', at), list.size());
    const std::string word = list.substr(at, comma - at);
    bool known = false;
    for (const auto& [name, field] : Faults::table()) {
      if (name != word) continue;
      faults.*field = true;
      known = true;
    }
    if (!known) return false;
    at = comma + 1;
  }
  return true;
}

int usage(const std::string& problem) {
  std::fprintf(stderr,
               "needle_sim: %s\nusage: needle_sim [--seed N | --seeds A..B] [--operations N] [--faults LIST] [--history] "
               "[--lines N] [--probes] [--list-faults]\n",
               problem.c_str());
  return 2;
}

int run(const Arguments& arguments) {
  Totals totals;
  for (uint64_t seed = arguments.first_seed; seed <= arguments.last_seed; ++seed) {
    const Outcome outcome = run_seed(seed, arguments, arguments.prints_history);
    totals.add(outcome.totals);
    if (!outcome.violation.has_value()) {
      if (arguments.prints_history) print_history(outcome.history, arguments.lines);
      continue;
    }
    std::printf("needle_sim: seed %llu violates an invariant: %s\n", static_cast<unsigned long long>(seed), outcome.violation->c_str());
    const Arguments smaller = shrink(seed, arguments);
    const Outcome replay = run_seed(seed, smaller, true);
    std::printf("smallest run that fails: --seed %llu --operations %lld --faults %s\n", static_cast<unsigned long long>(seed),
                static_cast<long long>(smaller.operations), names_of(smaller.faults).c_str());
    print_history(replay.history, arguments.lines);
    return 1;
  }
  std::printf(
      "needle_sim: seeds %llu..%llu, faults %s: %lld operations, %lld steps, %lld pages verified, %lld kills at a metadata write, "
      "0 violations\n",
      static_cast<unsigned long long>(arguments.first_seed), static_cast<unsigned long long>(arguments.last_seed),
      names_of(arguments.faults).c_str(), static_cast<long long>(totals.operations), static_cast<long long>(totals.steps),
      static_cast<long long>(totals.pages_verified), static_cast<long long>(totals.kills_at_write));
  if (arguments.prints_probes) {
    for (const auto& [name, count] : totals.probes)
      std::printf("  %-28s %llu%s\n", name.c_str(), static_cast<unsigned long long>(count), count == 0 ? "   <- never reached" : "");
  }
  return 0;
}

}  // namespace
}  // namespace needle::sim

int main(int argc, char** argv) {
  using namespace needle::sim;  // NOLINT: main of this program
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const std::string value = i + 1 < argc ? argv[i + 1] : "";
    if (word == "--history") {
      arguments.prints_history = true;
    } else if (word == "--probes") {
      arguments.prints_probes = true;
    } else if (word == "--list-faults") {
      for (const auto& [name, field] : Faults::table()) std::printf("%s\n", name.c_str());
      return 0;
    } else if (value.empty()) {
      return usage("'" + word + "' is unknown or lacks its value");
    } else {
      ++i;
      if (word == "--seed") {
        arguments.first_seed = arguments.last_seed = std::strtoull(value.c_str(), nullptr, 10);
      } else if (word == "--seeds") {
        const size_t dots = value.find("..");
        if (dots == std::string::npos) return usage("--seeds wants A..B, got '" + value + "'");
        arguments.first_seed = std::strtoull(value.c_str(), nullptr, 10);
        arguments.last_seed = std::strtoull(value.c_str() + dots + 2, nullptr, 10);
      } else if (word == "--operations") {
        arguments.operations = std::strtoll(value.c_str(), nullptr, 10);
      } else if (word == "--lines") {
        arguments.lines = std::strtoll(value.c_str(), nullptr, 10);
      } else if (word == "--faults") {
        if (!parse_faults(value, arguments.faults)) return usage("'" + value + "' names an unknown fault; --list-faults lists them");
      } else {
        return usage("'" + word + "' is unknown");
      }
    }
  }
  std::signal(SIGABRT, &tell_seed);
  return run(arguments);
}
