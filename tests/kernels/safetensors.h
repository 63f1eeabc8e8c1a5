// A small reader of safetensors files (8-byte header length, JSON header, little-endian tensors), and the folder of
// golden files.
//
// What must stay true:
//  1. The folder comes from NEEDLE_GOLDEN_DIR at run time, the in-tree copies otherwise.
//  2. Files are told apart by the tensors they hold, never by their names; an empty folder is an error, not a pass.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace needle::testing {

struct Tensor {
  std::string dtype;  // as the file says: F32, BF16, I32, ...
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;

  int64_t count() const {
    int64_t product = 1;
    for (int64_t size : shape) product *= size;
    return product;
  }

  // The raw patterns of a BF16 tensor.
  std::vector<uint16_t> bf16_bits() const {
    NEEDLE_CHECK(dtype == "BF16", "the test asks a tensor of another type for bf16 patterns");
    return copy_as<uint16_t>();
  }

  // F64, F32 and BF16 as float.
  std::vector<float> floats() const {
    if (dtype == "F32") return copy_as<float>();
    std::vector<float> values;
    if (dtype == "F64") {
      for (double value : copy_as<double>()) values.push_back(static_cast<float>(value));
      return values;
    }
    for (uint16_t bits : bf16_bits()) {
      const uint32_t wide = static_cast<uint32_t>(bits) << 16;
      float value;
      std::memcpy(&value, &wide, sizeof value);
      values.push_back(value);
    }
    return values;
  }

  // I32 and I64.
  std::vector<int64_t> integers() const {
    if (dtype == "I64") return copy_as<int64_t>();
    NEEDLE_CHECK(dtype == "I32", "the test asks a tensor of another type for integers");
    const std::vector<int32_t> narrow = copy_as<int32_t>();
    return std::vector<int64_t>(narrow.begin(), narrow.end());
  }

 private:
  template <class Number>
  std::vector<Number> copy_as() const {
    std::vector<Number> numbers(bytes.size() / sizeof(Number));
    if (!numbers.empty()) std::memcpy(numbers.data(), bytes.data(), numbers.size() * sizeof(Number));
    return numbers;
  }
};

struct SafetensorsFile {
  std::string name;  // for messages only
  std::map<std::string, Tensor> tensors;
  std::map<std::string, std::string> metadata;

  bool has(const std::string& tensor) const { return tensors.count(tensor) != 0; }
  const Tensor& at(const std::string& tensor) const {
    NEEDLE_CHECK(has(tensor), "the test asks for a tensor that the file lacks; ask has() first");
    return tensors.at(tensor);
  }
};

inline absl::StatusOr<SafetensorsFile> read_safetensors(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary | std::ios::ate);
  if (!stream) return absl::NotFoundError(absl::StrCat("cannot open ", path.string()));
  const int64_t file_bytes = static_cast<int64_t>(stream.tellg());
  stream.seekg(0);
  uint64_t header_bytes = 0;
  stream.read(reinterpret_cast<char*>(&header_bytes), sizeof header_bytes);
  if (!stream || file_bytes < 8 || header_bytes > static_cast<uint64_t>(file_bytes - 8)) {
    return absl::DataLossError(absl::StrCat(path.string(), ": the header is said to take ", header_bytes, " of ", file_bytes, " bytes"));
  }
  std::string header(header_bytes, '\0');
  stream.read(header.data(), static_cast<std::streamsize>(header_bytes));
  const nlohmann::json parsed = nlohmann::json::parse(header, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object()) return absl::DataLossError(absl::StrCat(path.string(), ": the header is no JSON object"));

  static const std::map<std::string, int64_t> kBytesOf = {{"F64", 8}, {"I64", 8}, {"F32", 4}, {"I32", 4}, {"BF16", 2},
                                                          {"F16", 2}, {"I16", 2}, {"U8", 1},  {"I8", 1},  {"BOOL", 1}};
  SafetensorsFile file;
  file.name = path.filename().string();
  for (const auto& [name, entry] : parsed.items()) {
    if (name == "__metadata__") {
      for (const auto& [key, value] : entry.items()) {
        if (value.is_string()) file.metadata[key] = value.get<std::string>();
      }
      continue;
    }
    const bool whole = entry.is_object() && entry.contains("dtype") && entry["dtype"].is_string() && entry.contains("shape") &&
                       entry["shape"].is_array() && entry.contains("data_offsets") && entry["data_offsets"].is_array() &&
                       entry["data_offsets"].size() == 2;
    if (!whole) return absl::DataLossError(absl::StrCat(path.string(), ": tensor ", name, " is not described"));
    Tensor tensor;
    tensor.dtype = entry["dtype"].get<std::string>();
    for (const auto& size : entry["shape"]) tensor.shape.push_back(size.get<int64_t>());
    const int64_t begin = entry["data_offsets"][0].get<int64_t>();
    const int64_t end = entry["data_offsets"][1].get<int64_t>();
    const auto size = kBytesOf.find(tensor.dtype);
    if (size == kBytesOf.end() || begin < 0 || end < begin || end > file_bytes - 8 - static_cast<int64_t>(header_bytes) ||
        end - begin != tensor.count() * size->second) {
      return absl::DataLossError(absl::StrCat(path.string(), ": tensor ", name, " of type ", tensor.dtype, " takes bytes ", begin, "..",
                                              end, ", which does not fit its shape or the file"));
    }
    tensor.bytes.resize(static_cast<size_t>(end - begin));
    stream.seekg(8 + static_cast<int64_t>(header_bytes) + begin);
    stream.read(reinterpret_cast<char*>(tensor.bytes.data()), end - begin);
    if (!stream) return absl::DataLossError(absl::StrCat(path.string(), ": tensor ", name, " is cut short"));
    file.tensors.emplace(name, std::move(tensor));
  }
  return file;
}

inline std::filesystem::path golden_dir() {
  const char* chosen = std::getenv("NEEDLE_GOLDEN_DIR");
  if (chosen != nullptr && *chosen != '\0') return chosen;
  return std::filesystem::path(NEEDLE_SOURCE_DIR) / "tests" / "golden";
}

// Every *.safetensors of the golden folder, in order of name.
inline absl::StatusOr<std::vector<SafetensorsFile>> read_golden() {
  std::error_code error;
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(golden_dir(), error)) {
    if (entry.path().extension() == ".safetensors") paths.push_back(entry.path());
  }
  if (error) return absl::NotFoundError(absl::StrCat("cannot list ", golden_dir().string(), ": ", error.message()));
  if (paths.empty()) {
    return absl::NotFoundError(absl::StrCat(golden_dir().string(), " holds no *.safetensors; point NEEDLE_GOLDEN_DIR at the golden files"));
  }
  std::sort(paths.begin(), paths.end());
  std::vector<SafetensorsFile> files;
  for (const auto& path : paths) {
    absl::StatusOr<SafetensorsFile> file = read_safetensors(path);
    if (!file.ok()) return file.status();
    files.push_back(*std::move(file));
  }
  return files;
}

}  // namespace needle::testing
