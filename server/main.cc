// needled: reads options, starts a node, waits for a signal, drains, stops. Or runs as the keeper.
//
// Exit codes: 0 a clean end; 1 a configuration error (the message names it); 2 it could not start; 3 a drain that was cut
// off at its deadline.
#include <fcntl.h>
#include <malloc.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <new>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/units.h"
#include "proto/attach.h"
#include "proto/errors.h"
#include "server/daemon_options.h"
#include "server/listen_address.h"
#include "server/memory/descriptor_store.h"
#include "server/memory/host_memory.h"
#include "server/memory/keeper.h"
#include "server/metrics.h"
#include "server/node.h"
#include "server/node_plan.h"

extern char** environ;

namespace needle::server {
namespace {

// What std::thread and new throw where a limit of the process refuses them; anything else is a bug and leaves a core.
void end_of_exception() {
  try {
    if (std::current_exception() != nullptr) std::rethrow_exception(std::current_exception());
  } catch (const std::system_error& error) {
    std::fprintf(stderr, "needled: cannot start a thread: %s; raise the limits of processes and of address space (ulimit -u, ulimit -v)\n",
                 error.what());
    std::_Exit(2);
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "needled: no memory for the daemon itself; lower memory.bytes or raise the limit of address space (ulimit -v)\n");
    std::_Exit(2);
  } catch (...) {
  }
  std::abort();
}

int complain(const absl::Status& status, int code) {
  std::fprintf(stderr, "needled: %s\n", std::string(status.message()).c_str());
  return code;
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Signals as a descriptor: nothing of ours runs in a handler. Blocked before any thread starts.
FileDescriptor stop_signals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  ::sigprocmask(SIG_BLOCK, &set, nullptr);
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGXFSZ, SIG_IGN);  // a memfd beyond RLIMIT_FSIZE is refused in words, not by a signal
  return FileDescriptor(::signalfd(-1, &set, SFD_CLOEXEC));
}

// True when a signal came within the time.
bool wait_for_signal(int signals, int64_t timeout_ms) {
  struct timespec wait = {timeout_ms / 1000, (timeout_ms % 1000) * 1'000'000};
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  (void)signals;
  return ::sigtimedwait(&set, nullptr, &wait) > 0;
}

// 0711 where other users may attach: they reach attach.sock, which looks at their credentials, and list nothing.
absl::Status make_runtime_dir(const std::string& path, bool others_attach) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  struct stat found {};
  std::string why = error ? error.message() : "";
  if (why.empty() && ::lstat(path.c_str(), &found) != 0) why = std::strerror(errno);
  if (why.empty() && !S_ISDIR(found.st_mode)) why = S_ISLNK(found.st_mode) ? "it is a symbolic link" : "it is no folder";
  if (!why.empty()) {
    return make_error(ErrorCode::kInvalid, absl::StrCat("the runtime folder ", path, " cannot be made: ", why,
                                                        "; set XDG_RUNTIME_DIR or --node-runtime-dir to a folder of this user"));
  }
  if (found.st_uid != ::geteuid()) {
    return make_error(ErrorCode::kInvalid,
                      absl::StrCat("the runtime folder ", path, " belongs to user ", found.st_uid, ", not to ", ::geteuid()));
  }
  if (::chmod(path.c_str(), others_attach ? 0711 : 0700) != 0)
    return make_error(ErrorCode::kInvalid, absl::StrCat("chmod ", path, ": ", std::strerror(errno)));
  ::umask(0077);  // sockets are bound before their mode is set
  return absl::OkStatus();
}

std::unique_ptr<DescriptorStore> open_store(const std::string& choice, const std::string& runtime_dir, SystemdStore& systemd,
                                            bool under_systemd, Log& log, absl::Status& failure) {
  class Borrowed final : public DescriptorStore {  // systemd's store also says READY, so main keeps it
   public:
    explicit Borrowed(DescriptorStore& store) : store_(store) {}
    void keep(const std::string& name, int fd) override { store_.keep(name, fd); }
    void drop(const std::string& name) override { store_.drop(name); }
    std::vector<KeptDescriptor> take_kept() override { return store_.take_kept(); }
    std::string kind() const override { return store_.kind(); }
    bool healthy() const override { return store_.healthy(); }

   private:
    DescriptorStore& store_;
  };
  if (choice == "none") return std::make_unique<NoDescriptorStore>();
  if (choice == "systemd" || (choice == "auto" && under_systemd)) {
    if (!under_systemd)
      failure = make_error(ErrorCode::kInvalid, "memory.keeper is systemd, but NOTIFY_SOCKET is not set; see deploy/needled.service");
    return std::make_unique<Borrowed>(systemd);
  }
  const std::string path = choice == "auto" ? runtime_dir + "/" + attach::kKeeperSocketName : choice;
  absl::StatusOr<std::unique_ptr<KeeperStore>> keeper = KeeperStore::connect(path, log);
  if (keeper.ok()) return *std::move(keeper);
  if (choice != "auto") failure = keeper.status();
  return std::make_unique<NoDescriptorStore>();
}

// A budget that depends on what was free at start may differ at the next one; the pools then do not fit what was kept.
absl::Status check_keeper(const DaemonOptions& options) {
  const std::string& choice = options.memory_keeper;
  if (choice == "none" || choice == "auto" || options.memory_bytes != 0) return absl::OkStatus();
  return make_error(ErrorCode::kInvalid,
                    absl::StrCat("memory.keeper is ", choice,
                                 ", and memory.bytes is not set: a budget made of the memory available at start may "
                                 "be another after a restart, and what was kept would be lost; set memory.bytes, or memory.keeper = none"));
}

int run_keeper(const NodePlan& plan, const std::string& choice, int signals, Log& log) {
  const bool named = choice != "auto" && choice != "none" && choice != "systemd";
  const std::string path = named ? choice : plan.runtime_dir + "/" + attach::kKeeperSocketName;
  absl::StatusOr<std::unique_ptr<Keeper>> keeper = Keeper::listen(path, log);
  if (!keeper.ok()) return complain(keeper.status(), 2);
  log.write(LogLevel::kInfo, "keeper_ready", {{"socket", path}, {"holds_at_most", absl::StrCat((*keeper)->kept_max())}});
  (*keeper)->run(signals);
  log.write(LogLevel::kInfo, "keeper_stopped", {{"held", absl::StrCat((*keeper)->kept_count())}});
  return 0;
}

int64_t limit_of(int resource) {
  rlimit limit{RLIM_INFINITY, RLIM_INFINITY};
  (void)::getrlimit(static_cast<__rlimit_resource_t>(resource), &limit);
  return limit.rlim_cur > rlim_t{INT64_MAX} ? INT64_MAX : static_cast<int64_t>(limit.rlim_cur);
}

// Addresses of this machine must be ones; a peer's name may come to be known later.
absl::Status check_addresses(const DaemonOptions& options, const NodePlan& plan) {
  if (absl::Status status = check_listen_address("listen.grpc", plan.grpc_address); !status.ok()) return status;
  if (absl::Status status = check_listen_address("listen.metrics", plan.metrics_address); !status.ok()) return status;
  return options.listen_advertise.empty() ? absl::OkStatus() : check_resolves("listen.advertise", options.listen_advertise);
}

int run_node(const ParsedOptions& parsed, const NodePlan& plan, DescriptorStore& store, std::vector<KeptDescriptor> kept,
             SystemdStore& systemd, int signals, Log& log) {
  absl::StatusOr<std::unique_ptr<Node>> node = Node::start(parsed, plan, store, std::move(kept), log);
  if (!node.ok()) return complain(node.status(), 2);
  systemd.notify("READY=1");
  while (!wait_for_signal(signals, 1000)) (*node)->tend();

  systemd.notify("STOPPING=1");
  (*node)->drain();
  SteadyClock clock;
  const int64_t deadline_ns = clock.now_ns() + parsed.options.stop_deadline_ms * kNanosPerMilli;
  bool drained = (*node)->drained();
  while (!drained && clock.now_ns() < deadline_ns) {
    if (wait_for_signal(signals, 50)) break;  // a second signal: at once
    drained = (*node)->drained();
  }
  log.write(drained ? LogLevel::kInfo : LogLevel::kWarning, drained ? "drained" : "drain_cut_off",
            {{"deadline_ms", absl::StrCat(parsed.options.stop_deadline_ms)}});
  (*node)->stop();
  return drained ? 0 : 3;
}

int main_of(const std::vector<std::string>& arguments) {
  std::vector<std::string> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) environment.emplace_back(*entry);
  for (const std::string& argument : arguments) {  // even with a broken configuration around
    if (argument == "--help" || argument == "-h") return std::fputs(options_help().c_str(), stdout) < 0;
    if (argument == "--version") return std::printf("%s\n", build_text().c_str()) < 0;
    if (argument == "--reference") return std::fputs(options_reference().c_str(), stdout) < 0;
    if (argument == "--metrics-reference") return std::fputs(metrics_reference().c_str(), stdout) < 0;
  }
  absl::StatusOr<ParsedOptions> parsed = parse_options(arguments, environment);
  if (!parsed.ok()) return complain(parsed.status(), 1);

  const DaemonOptions& options = parsed->options;
  const LogLevel least = options.log_level == "debug"     ? LogLevel::kDebug
                         : options.log_level == "warning" ? LogLevel::kWarning
                         : options.log_level == "error"   ? LogLevel::kError
                                                          : LogLevel::kInfo;
  StreamLog log(stderr, least);
  const FileDescriptor signals = stop_signals();
  rlimit files{RLIM_INFINITY, RLIM_INFINITY};
  if (::getrlimit(RLIMIT_NOFILE, &files) == 0) {  // two descriptors a chunk
    files.rlim_cur = files.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &files);
  }
  const ProcessLimits limits{limit_of(RLIMIT_NOFILE), limit_of(RLIMIT_AS), ::sysconf(_SC_NPROCESSORS_ONLN)};
  // A heap reserves 64 MiB of addresses, and threads that meet in malloc get new ones: how much is needed would be chance.
  if (limits.address_bytes != INT64_MAX) ::mallopt(M_ARENA_MAX, 2);

  Surroundings surroundings = surroundings_here();
  surroundings.available_bytes = available_memory_bytes();

  const std::string notify_socket = variable("NOTIFY_SOCKET");
  SystemdStore systemd(notify_socket, variable("LISTEN_PID"), variable("LISTEN_FDS"), variable("LISTEN_FDNAMES"), log);

  if (parsed->action == OptionAction::kCheckConfig) {
    if (absl::Status status = check_keeper(options); !status.ok()) return complain(status, 1);
    absl::StatusOr<NodePlan> plan = plan_node(options, surroundings);
    if (!plan.ok()) return complain(plan.status(), 1);
    if (absl::Status status = check_addresses(options, *plan); !status.ok()) return complain(status, 1);
    std::fputs(describe(*plan).c_str(), stdout);
    for (const std::string& peer : options.peers) {
      const absl::StatusOr<PeerName> named = parse_peer(peer);
      const absl::Status known = named.ok() ? check_resolves("peers.static", named->address) : named.status();
      if (!known.ok()) std::printf("for now, %s\n", std::string(known.message()).c_str());
    }
    for (const OptionProvenance& row : parsed->provenance) {
      if (row.source != "default") std::printf("%s = %s  (%s)\n", row.name.c_str(), row.value.c_str(), row.source.c_str());
    }
    return 0;
  }

  // Only its places count here: the folder is where a keeper listens, and what the keeper kept counts as available below.
  Surroundings roomy = surroundings;
  roomy.available_bytes = std::max(options.memory_bytes, 64 * kGiB);
  absl::StatusOr<NodePlan> places = plan_node(options, roomy);
  if (!places.ok()) return complain(places.status(), 1);
  if (absl::Status status = make_runtime_dir(places->runtime_dir, !options.attach_uids.empty()); !status.ok()) return complain(status, 2);
  if (parsed->action == OptionAction::kKeeper) return run_keeper(*places, options.memory_keeper, signals.get(), log);

  if (absl::Status status = check_keeper(options); !status.ok()) return complain(status, 1);
  absl::Status failure;
  const std::unique_ptr<DescriptorStore> store =
      open_store(options.memory_keeper, places->runtime_dir, systemd, !notify_socket.empty(), log, failure);
  if (!failure.ok()) return complain(failure, 2);
  if (options.memory_bytes == 0 && store->kind() != "none") {
    log.write(LogLevel::kWarning, "keeper_needs_memory_bytes",
              {{"store", store->kind()},
               {"cause", "the budget may be another after a restart, and what was kept would be lost; set memory.bytes"}});
  }
  std::vector<KeptDescriptor> kept = store->take_kept();
  if (!store->healthy()) {  // going on would put empty chunks in the place of what it may hold
    return complain(
        make_error(ErrorCode::kMemory, absl::StrCat("the ", store->kind(),
                                                    " did not say all that it holds; nothing was changed there, start again, or "
                                                    "set memory.keeper = none to start without it")),
        2);
  }
  for (const KeptDescriptor& descriptor : kept) {
    struct stat found {};
    if (::fstat(descriptor.fd.get(), &found) == 0) surroundings.available_bytes += static_cast<int64_t>(found.st_blocks) * 512;
  }
  absl::StatusOr<NodePlan> plan = plan_node(options, surroundings);
  if (!plan.ok()) return complain(plan.status(), 1);
  if (absl::Status status = check_addresses(options, *plan); !status.ok()) return complain(status, 1);
  if (absl::Status status = check_limits(*plan, limits); !status.ok()) return complain(status, 2);
  return run_node(*parsed, *plan, *store, std::move(kept), systemd, signals.get(), log);
}

}  // namespace
}  // namespace needle::server

int main(int argc, char** argv) {
  // Not caught in main: the way there would wait for threads that a daemon without its last one cannot end.
  std::set_terminate(needle::server::end_of_exception);
  const int code = needle::server::main_of(std::vector<std::string>(argv + 1, argv + argc));
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  std::fprintf(stderr, "needled: standard output cannot be written: %s\n", std::strerror(errno));
  return code == 0 ? 1 : code;
}
