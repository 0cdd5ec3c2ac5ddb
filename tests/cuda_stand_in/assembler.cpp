// Takes ptxas's place for Triton: in place of machine code, which nothing here could run, it writes
// what each kernel may do with the memory behind its parameters. driver.cpp reads it.
//
//   ptxas [OPTIONS] KERNEL.ptx -o KERNEL.o
//
// The result is text: the first line is `stand-in kernels`; of each kernel a line `kernel NAME`, and of
// each of its parameters a line `parameter BYTES r`, `w`, `rw` or `-`: whether an address computed from
// the parameter is read, or written, or both. What a kernel reads only after it has written there, as
// reductions in two loops do, is `w`.
//
// Addresses are followed through registers in any order of instructions, and through shared memory, so
// the answer covers every way through the kernel. What is loaded from memory is no address.
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

using std::set;
using std::string;
using std::vector;

namespace {

struct Parameter { size_t bytes; bool reads = false, writes = false; };

struct Kernel {
  string name;
  vector<Parameter> parameters;
  std::map<string, size_t> index;          // of a parameter, by its name
  std::map<string, set<size_t>> from;      // of a register: the parameters it is computed from
  bool changed = false;

  set<size_t> of(const vector<string>& registers) {
    set<size_t> all;
    for (const string& r : registers) all.insert(from[r].begin(), from[r].end());
    return all;
  }
  void flow(const vector<string>& to, const set<size_t>& what) {
    for (const string& r : to)
      for (size_t p : what) changed |= from[r].insert(p).second;
  }
  void access(const set<size_t>& what, bool reads, bool writes) {
    for (size_t p : what) {
      parameters[p].reads |= reads && !parameters[p].writes;
      parameters[p].writes |= writes;
    }
  }
};

const string kShared = "shared memory";

bool starts(const string& text, const char* with) { return text.rfind(with, 0) == 0; }
bool has(const string& text, const char* part) { return text.find(part) != string::npos; }

vector<string> registers_in(const string& text) {
  static const std::regex pattern("%[A-Za-z]+[A-Za-z0-9_]*");
  vector<string> all;
  for (std::sregex_iterator i(text.begin(), text.end(), pattern), end; i != end; ++i) all.push_back(i->str());
  return all;
}

// Operands, which commas part, but for those in brackets or braces.
vector<string> operands(const string& text) {
  vector<string> all(1);
  int depth = 0;
  for (char c : text) {
    depth += (c == '[' || c == '{' || c == '(') - (c == ']' || c == '}' || c == ')');
    if (c == ',' && depth == 0) all.emplace_back();
    else all.back() += c;
  }
  return all;
}

bool in_global_memory(const string& operation) {
  for (const char* space : {".param", ".shared", ".local", ".const"})
    if (has(operation, space)) return false;
  return true;
}

void instruction(Kernel& k, const string& operation, const string& rest) {
  vector<string> all = operands(rest);
  if (starts(operation, "cp.async")) {  // to shared memory, from where the second operand points
    if (all.size() > 1) k.access(k.of(registers_in(all[1])), !has(operation, ".global.shared"), false);
    if (has(operation, ".global.shared")) k.access(k.of(registers_in(all[0])), false, true);
    return;
  }
  if (starts(operation, "ld.param") && all.size() == 2) {
    for (const auto& [name, i] : k.index)
      if (std::regex_search(all[1], std::regex("\\b" + name + "\\b"))) k.flow(registers_in(all[0]), {i});
    return;
  }
  bool atomic = starts(operation, "atom"), reduces = starts(operation, "red.");
  bool loads = starts(operation, "ld"), stores = starts(operation, "st.") || starts(operation, "st\t");
  if (loads || stores || atomic || reduces) {
    size_t address = loads || atomic ? 1 : 0;
    if (all.size() <= address) return;
    if (in_global_memory(operation))
      k.access(k.of(registers_in(all[address])), !stores, !loads);
    else if (has(operation, ".shared") && loads) k.flow(registers_in(all[0]), k.from[kShared]);
    else if (has(operation, ".shared") && stores) k.flow({kShared}, k.of(registers_in(all[1])));
    else if (stores) k.access(k.of(registers_in(all[1])), true, true);  // given to another function
    return;
  }
  if (all.size() < 2) return;
  set<size_t> sources;
  for (size_t i = 1; i < all.size(); ++i) {
    set<size_t> more = k.of(registers_in(all[i]));
    sources.insert(more.begin(), more.end());
  }
  k.flow(registers_in(all[0]), sources);
}

string without_comments(std::istream& file) {
  string text, line;
  while (std::getline(file, line)) {
    line = line.substr(0, line.find("//"));
    size_t begin = line.find_first_not_of(" \t");
    if (begin == string::npos) continue;
    if (starts(line.substr(begin), ".section")) break;  // what debuggers read
    if (starts(line.substr(begin), ".loc") || starts(line.substr(begin), ".file")) continue;
    text += line + "\n";
  }
  return text;
}

Kernel read_kernel(const string& name, const string& formal, const string& body) {
  Kernel k;
  k.name = name;
  static const std::regex parameter(R"(\.param\b([^,]*?)([A-Za-z_$][\w$]*)\s*(?:\[(\d+)\])?\s*(?:,|$))");
  for (std::sregex_iterator i(formal.begin(), formal.end(), parameter), end; i != end; ++i) {
    static const std::regex width(R"(\.[a-z](\d+)\b)");
    string type = (*i)[1];
    std::smatch bits;
    size_t bytes = std::regex_search(type, bits, width) ? std::stoul(bits[1]) / 8 : 8;
    if ((*i)[3].matched) bytes *= std::stoul((*i)[3]);
    k.index[(*i)[2]] = k.parameters.size();
    k.parameters.push_back({bytes});
  }
  vector<std::pair<string, string>> instructions;
  std::istringstream statements(body);
  string statement;
  static const std::regex before(R"(^(?:\s|[{}]|[\w$]+:|@!?%\w+)*)");
  while (std::getline(statements, statement, ';')) {
    statement = std::regex_replace(statement, before, "", std::regex_constants::format_first_only);
    if (statement.empty() || statement[0] == '.') continue;
    size_t space = statement.find_first_of(" \t\n");
    if (space != string::npos) instructions.push_back({statement.substr(0, space), statement.substr(space)});
  }
  do {
    k.changed = false;
    for (const auto& [operation, rest] : instructions) instruction(k, operation, rest);
  } while (k.changed);
  // Once more in order: now it is certain where each address comes from.
  for (Parameter& p : k.parameters) p.reads = p.writes = false;
  for (const auto& [operation, rest] : instructions) instruction(k, operation, rest);
  return k;
}

size_t end_of_block(const string& text, size_t open) {
  int depth = 0;
  for (size_t at = open; at < text.size(); ++at) {
    depth += (text[at] == '{') - (text[at] == '}');
    if (!depth) return at;
  }
  return text.size();
}

}  // namespace

int main(int count, char** words) {
  string from, to;
  for (int i = 1; i < count; ++i) {
    string word = words[i];
    if (word == "--version") {
      printf("Cuda compilation tools, release %d.0, V%d.0.0 (stand-in)\n", STANDIN_CUDA, STANDIN_CUDA);
      return 0;
    }
    if (word == "-o" && i + 1 < count) to = words[++i];
    else if (word[0] != '-') from = word;
  }
  std::ifstream file(from);
  if (!file || to.empty()) {
    fprintf(stderr, "stand-in: no PTX is to be read, or nothing to be written\n");
    return 1;
  }
  string text = without_comments(file);
  std::ofstream out(to);
  out << "stand-in kernels\n";
  static const std::regex entry(R"(\.entry\s+([\w$]+)\s*\(([^)]*)\))");
  for (std::sregex_iterator i(text.begin(), text.end(), entry), end; i != end; ++i) {
    size_t open = text.find('{', i->position() + i->length());
    Kernel k = read_kernel((*i)[1], (*i)[2], text.substr(open, end_of_block(text, open) - open));
    out << "kernel " << k.name << "\n";
    for (const Parameter& p : k.parameters)
      out << "parameter " << p.bytes << " " << (p.reads && p.writes ? "rw" : p.writes ? "w" : p.reads ? "r" : "-") << "\n";
  }
  return out ? 0 : 1;
}
