#include "client/page_names.h"

#include <openssl/evp.h>

#include <array>
#include <cstring>
#include <memory>

#include "base/check.h"

namespace needle::client {
namespace {

// SHA-256 of what was added, in the order it was added. Lengths go in before texts so that no two inputs run together.
class Digest {
 public:
  Digest() : context_(EVP_MD_CTX_new()) {
    NEEDLE_CHECK(context_ != nullptr && EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1, "libcrypto refuses SHA-256");
  }

  void add(const void* bytes, size_t size) {
    NEEDLE_CHECK(EVP_DigestUpdate(context_.get(), bytes, size) == 1, "libcrypto refuses an update");
  }
  void add_number(uint64_t value) {
    std::array<uint8_t, 8> little;
    for (size_t i = 0; i < 8; ++i) little[i] = static_cast<uint8_t>(value >> (8 * i));
    add(little.data(), little.size());
  }
  void add_text(const std::string& text) {
    add_number(text.size());
    add(text.data(), text.size());
  }

  PageName name() {
    std::array<uint8_t, 32> hash;
    unsigned int size = 0;
    NEEDLE_CHECK(EVP_DigestFinal_ex(context_.get(), hash.data(), &size) == 1 && size == hash.size(), "SHA-256 gives 32 bytes");
    PageName name;
    for (size_t i = 0; i < 8; ++i) {
      name.high |= static_cast<uint64_t>(hash[i]) << (8 * i);
      name.low |= static_cast<uint64_t>(hash[8 + i]) << (8 * i);
    }
    if (name.high == 0 && name.low == 0) name.low = 1;
    return name;
  }

 private:
  struct Free {
    void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
  };
  std::unique_ptr<EVP_MD_CTX, Free> context_;
};

void add_namespace(Digest& digest, const NameSpace& space) {
  digest.add_text("needle-page-name-1");
  digest.add_text(space.model);
  digest.add_text(space.revision);
  digest.add_number(space.format_fingerprint);
  digest.add_text(space.tenant_salt);
}

}  // namespace

std::vector<PageName> name_pages(const NameSpace& space, std::span<const int32_t> tokens, int64_t tokens_per_page) {
  NEEDLE_CHECK(tokens_per_page > 0, "a page holds at least one token");
  std::vector<PageName> names;
  const size_t page_tokens = static_cast<size_t>(tokens_per_page);
  for (size_t begin = 0; begin + page_tokens <= tokens.size(); begin += page_tokens) {
    Digest digest;
    if (names.empty()) {
      add_namespace(digest, space);
    } else {
      digest.add_number(names.back().high);
      digest.add_number(names.back().low);
    }
    for (int32_t token : tokens.subspan(begin, page_tokens)) digest.add_number(static_cast<uint32_t>(token));
    names.push_back(digest.name());
  }
  return names;
}

PageName name_of_engine_hash(const NameSpace& space, std::span<const uint8_t> hash_at_page_end) {
  Digest digest;
  add_namespace(digest, space);
  digest.add_number(hash_at_page_end.size());
  digest.add(hash_at_page_end.data(), hash_at_page_end.size());
  return digest.name();
}

}  // namespace needle::client
