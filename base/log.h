// One structured line an event: level, event name, key=value pairs. A name used here is the name of the metric
// and the enum too.
//
// What must stay true:
//  1. The sink is passed in by main() or the test; no global logger.
//  2. A line is written where the error is first known, with the cause observed, and not again further up.
//  3. Values never carry cached bytes or secrets.
//  4. Whatever a value holds, a line is one line of printable ASCII: other bytes are shown as \n or \xHH. A caller's text can
//     neither forge a line nor steer a terminal.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <string>
#include <string_view>

namespace needle {

enum class LogLevel : uint8_t { kDebug, kInfo, kWarning, kError };

struct LogField {
  std::string_view key;
  std::string value;
};

class Log {
 public:
  virtual ~Log() = default;
  virtual void write(LogLevel level, std::string_view event, std::initializer_list<LogField> fields) = 0;
};

class SilentLog final : public Log {
 public:
  void write(LogLevel, std::string_view, std::initializer_list<LogField>) override {}
};

// Lines to a stdio stream that the caller owns and that outlives the log. Safe from any thread (stdio locks a line).
class StreamLog final : public Log {
 public:
  StreamLog(std::FILE* stream, LogLevel least) : stream_(stream), least_(least) {}

  void write(LogLevel level, std::string_view event, std::initializer_list<LogField> fields) override {
    if (level < least_) return;
    static constexpr const char* kNames[] = {"debug", "info", "warning", "error"};
    std::string line = std::string("level=") + kNames[static_cast<int>(level)] + " event=";
    line.append(event);
    for (const LogField& field : fields) {
      line.append(" ").append(field.key).append("=");
      append_value(field.value, line);
    }
    line.push_back('\n');
    std::fwrite(line.data(), 1, line.size(), stream_);
  }

 private:
  static void append_value(std::string_view value, std::string& line) {
    const bool plain = !value.empty() && std::all_of(value.begin(), value.end(), [](char c) { return c > ' ' && c <= '~' && c != '"'; });
    if (plain) {
      line.append(value);
      return;
    }
    line.push_back('"');
    for (char c : value) {
      if (c == '\n') {
        line.append("\\n");
      } else if (c < ' ' || c > '~') {  // char may be signed: bytes from 0x80 on are below ' ' then
        constexpr char kDigits[] = "0123456789abcdef";
        const auto byte = static_cast<unsigned char>(c);
        line.append("\\x").append({kDigits[byte >> 4], kDigits[byte & 15]});
      } else {
        if (c == '"' || c == '\\') line.push_back('\\');
        line.push_back(c);
      }
    }
    line.push_back('"');
  }

  std::FILE* stream_;
  LogLevel least_;
};

}  // namespace needle
